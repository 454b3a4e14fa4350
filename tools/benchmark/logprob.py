"""The policy head measured: `python tools/benchmark/logprob.py [--tp 2] [--json FILE]`.

Time (forward + backward) and peak memory of the DIS loss from hidden states, by four heads:
  full     logits of all tokens, log_softmax, autograd
  megatron logits of all tokens, Megatron-Core's vocab_parallel_cross_entropy, autograd
  packaged torch.nn.functional.linear_cross_entropy in chunks, on the action tokens; it knows no vocabulary shards
  one pass sao_megatron's
Each ends with the weight's gradient added to a float32 `main_grad` that exists beforehand, as under Megatron's DDP.
Every measurement has its own process(es); rounds interleave the heads, and the table shows medians, of the worst rank.
Memory is the peak above weights, main_grad and inputs: resident on a CPU, allocated on a GPU. Time is on a CPU the
process's own CPU seconds, which other jobs change little; on a GPU elapsed seconds. The aims are ratios to `full` at
the same share of action tokens.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Aim, conclude

from sao_megatron.learner import runtime  # noqa: F401  isort: skip  (before Megatron: makes it run without a GPU)
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

from sao_megatron.algorithm.objective import PolicyGradient
from sao_megatron.device import has_gpu
from sao_megatron.engine.process import free_port
from sao_megatron.learner.logprob import one_pass_head

HEADS = ("full", "megatron", "packaged", "one pass")
SHARES = (1.0, 0.2)
MEMORY_AIM = 1 / 8
TIME_AIMS = {1.0: 1.05, 0.2: 0.30}


@dataclass
class Problem:
    """hidden [tokens, h]; weight [V/tp, h] with main_grad; actions [n]: which tokens are; targets, objective: of n."""

    hidden: torch.Tensor
    weight: torch.nn.Parameter
    actions: torch.Tensor
    targets: torch.Tensor
    objective: PolicyGradient

    def loss(self, logprobs: torch.Tensor) -> torch.Tensor:
        """The DIS loss by autograd; logprobs: [n]."""
        return -(self.objective.coefficients(logprobs.detach(), 0) * logprobs).sum()


def make_problem(args: argparse.Namespace) -> Problem:
    """Random inputs in which nearly every action token is kept: log-probs are about −log V, ratios about 1."""
    device, dtype = "cuda" if has_gpu() else "cpu", getattr(torch, args.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)
    weight = torch.nn.Parameter(normal(args.vocabulary // args.tp, args.hidden).mul_(1e-3).to(dtype))
    weight.main_grad = torch.empty(weight.shape, device=device).zero_()  # zeros() would leave its memory untouched
    count = round(args.tokens * args.share[0])
    actions = torch.randperm(args.tokens, generator=generator, device=device)[:count].sort().values
    targets = torch.randint(args.vocabulary, (count,), generator=generator, device=device)
    rollout = 0.1 * normal(count) - torch.tensor(float(args.vocabulary)).log()
    objective = PolicyGradient(rollout, normal(count))
    return Problem(normal(args.tokens, args.hidden).to(dtype).requires_grad_(), weight, actions, targets, objective)


def full(p: Problem, group: dist.ProcessGroup) -> torch.Tensor:
    logits = (p.hidden @ p.weight.t()).float()
    if group.size() == 1:
        return p.loss(torch.log_softmax(logits, -1)[p.actions, p.targets])
    # shards: each normalises by itself, then by the exchanged normalisers
    own = torch.logsumexp(logits, -1)
    total = reduce_from_tensor_model_parallel_region(own.exp().clone(), group).log()  # in place: hence the clones
    local = p.targets - group.rank() * len(p.weight)
    here = (local >= 0) & (local < len(p.weight))
    chosen = logits[p.actions, local.clamp(0, len(p.weight) - 1)] * here
    return p.loss(reduce_from_tensor_model_parallel_region(chosen.clone(), group) - total[p.actions])


def megatron(p: Problem, group: dist.ProcessGroup) -> torch.Tensor:
    targets = p.actions.new_zeros(len(p.hidden)).index_copy(0, p.actions, p.targets)
    losses = vocab_parallel_cross_entropy(p.hidden @ p.weight.t(), targets, tp_group=group)
    return p.loss(-losses[p.actions])


def packaged(p: Problem, group: dist.ProcessGroup) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None)
    losses = F.linear_cross_entropy(p.hidden[p.actions], p.weight, p.targets, reduction="none", options=options)
    return p.loss(-losses)


def one_pass(p: Problem, group: dist.ProcessGroup) -> torch.Tensor:
    return one_pass_head(p.hidden[p.actions], p.weight, p.targets, p.objective, group, into_main_grad=True).loss


LOSSES: dict[str, Callable[[Problem, dist.ProcessGroup], torch.Tensor]] = dict(
    zip(HEADS, (full, megatron, packaged, one_pass), strict=True))


@dataclass(frozen=True)
class Measurement:
    seconds: float
    elapsed: float
    peak_bytes: int


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def first(p: Problem, tokens: int) -> Problem:
    """The problem's first tokens, half of them actions as far as it has as many."""
    n = min(tokens // 2, len(p.targets))
    objective = PolicyGradient(p.objective.rollout_logprobs[:n], p.objective.advantages[:n])
    return Problem(p.hidden[:tokens].detach().requires_grad_(), p.weight,
                   torch.arange(n, device=p.targets.device), p.targets[:n], objective)


def run(p: Problem, head: str, group: dist.ProcessGroup) -> None:
    LOSSES[head](p, group).backward()
    if p.weight.grad is not None:
        p.weight.main_grad.add_(p.weight.grad)
    p.weight.grad = p.hidden.grad = None


def measure(p: Problem, head: str, group: dist.ProcessGroup) -> Measurement:
    """One forward and backward after a warm-up: on a GPU of its own size, since kernels are chosen by size; on a CPU a
    small one, which touches the libraries' code and working memory."""
    if has_gpu():
        run(p, head, group)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        run(first(p, 32), head, group)
        ctypes.CDLL(None).malloc_trim(0)  # what the warm-up freed is not to be counted as there already
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        before = resident("VmRSS")
    dist.barrier(group)
    cpu, clock = time.process_time(), time.perf_counter()
    run(p, head, group)
    if has_gpu():
        torch.cuda.synchronize()
    elapsed, seconds = time.perf_counter() - clock, time.process_time() - cpu
    peak = torch.cuda.max_memory_allocated() if has_gpu() else resident("VmHWM")
    return Measurement(elapsed if has_gpu() else seconds, elapsed, peak - before)


def worker(args: argparse.Namespace) -> None:
    """One rank of one measurement; rank 0 prints the worst of all ranks as JSON."""
    if has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(args.threads)
    dist.init_process_group("nccl" if has_gpu() else "gloo", timeout=timedelta(minutes=10))
    mine = measure(make_problem(args), args.head[0], dist.group.WORLD)
    ranks: list = [None] * args.tp
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        print(json.dumps({key: max(asdict(rank)[key] for rank in ranks) for key in asdict(mine)}))
    dist.destroy_process_group()


def run_worker(args: argparse.Namespace, head: str, share: float) -> Measurement:
    """Measure in fresh processes. RuntimeError with their output if one fails or takes over 15 minutes."""
    command = [sys.executable, __file__, "--worker", "--head", head, "--share", str(share)]
    for name in ("tokens", "vocabulary", "hidden", "dtype", "tp", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    common = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[1:]), "OMP_NUM_THREADS": str(args.threads),
                           "WORLD_SIZE": str(args.tp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(args.tp)]
    outputs = [rank.communicate(timeout=900) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            raise RuntimeError(f"the {head} head failed at {share:.0%} action tokens:\n{errors[-3000:]}")
    return Measurement(**json.loads(outputs[0][0].strip().splitlines()[-1]))


def summarise(found: dict[tuple[str, float], list[Measurement]]) -> list[dict]:
    """One row per head and share: medians, and ratios to `full`."""
    rows = []
    for (head, share), runs in found.items():
        seconds, peak = (statistics.median(getattr(run, name) for run in runs) for name in ("seconds", "peak_bytes"))
        base = found["full", share]
        rows.append(dict(head=head, share=share, seconds=seconds, peak_bytes=peak,
                         elapsed=statistics.median(run.elapsed for run in runs),
                         time_ratio=seconds / statistics.median(run.seconds for run in base),
                         memory_ratio=peak / statistics.median(run.peak_bytes for run in base)))
    return rows


def aims(rows: list[dict]) -> list[Aim]:
    return [aim for row in rows if row["head"] == "one pass" for aim in (
        Aim(f"one pass, {row['share']:.0%} action tokens, time of full", row["time_ratio"], TIME_AIMS[row["share"]]),
        Aim(f"one pass, {row['share']:.0%} action tokens, memory of full", row["memory_ratio"], MEMORY_AIM))]


def show(args: argparse.Namespace, rows: list[dict]) -> None:
    clock = "elapsed" if has_gpu() else "CPU"
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden {args.hidden}, {args.dtype}, TP {args.tp}, "
          f"{torch.cuda.get_device_name() if has_gpu() else f'CPU, {args.threads} thread(s) a rank'}; "
          f"median of {args.rounds}")
    print(f"{'action tokens':>13}  {'head':<9}{clock + ' s':>10}{'of full':>9}{'peak MB':>9}{'of full':>9}")
    for row in rows:
        print(f"{row['share']:>13.0%}  {row['head']:<9}{row['seconds']:>10.2f}{row['time_ratio']:>9.3f}"
              f"{row['peak_bytes'] / 1e6:>9.0f}{row['memory_ratio']:>9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = has_gpu()
    parser.add_argument("--tokens", type=int, default=32768 if gpu else 4096, help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=151936, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if gpu else "float32",
                        help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="ranks, each with its part of the vocabulary (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: %(default)s)")
    parser.add_argument("--head", choices=HEADS, action="append", help="this one beside `full` (default: all)")
    parser.add_argument("--share", type=float, choices=SHARES, action="append", help="this one (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # in the processes this one starts
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    heads = [head for head in HEADS if head in ("full", *(args.head or HEADS)) and (head != "packaged" or args.tp == 1)]
    found: dict[tuple[str, float], list[Measurement]] = {
        (head, share): [] for share in args.share or SHARES for head in heads}
    for _ in range(args.rounds):
        for head, share in found:
            found[head, share].append(run_worker(args, head, share))
    rows = summarise(found)
    show(args, rows)
    conclude(rows, aims(rows), args.json, tokens=args.tokens, vocabulary=args.vocabulary, hidden=args.hidden,
             dtype=args.dtype, tp=args.tp, rounds=args.rounds)


if __name__ == "__main__":
    main()
