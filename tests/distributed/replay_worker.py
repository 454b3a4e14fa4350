"""One rank of test_routing_replay.py: log-probs and gradients with recorded routing under several layouts."""
from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

from sao_megatron.learner import runtime
import numpy as np
import torch
import torch.distributed as dist
from layout_worker import policy_gradients
from megatron.core.transformer.moe.moe_layer import MoELayer

from sao_megatron import config as configs
from sao_megatron.errors import RunError
from sao_megatron.learner.passes import local_batches, local_micro_batches
from sao_megatron.learner.routing_replay import RoutingReplay
from sao_megatron.learner.trainer import Trainer
from sao_megatron.trajectory.routing import Routing
from sao_megatron.weights import hf


def make_learner(model_dir: Path, parallel, budget: int, replay: bool = True) -> Trainer:
    config = configs.parse(dict(
        name="t", model=dict(path=str(model_dir), dtype="float32"), parallel=parallel.model_dump(),
        task=dict(name="random"), batch=dict(tokens_per_micro_batch=budget), rollout=dict(routing_replay=replay)))
    return Trainer(config, hf.read_config(model_dir), hf.SafetensorsFolder(model_dir))


class Recorder:
    """Keeps what a router chooses by itself."""

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.experts = experts.numpy()
        return values, experts


def own_routing(free: Trainer, trajectories: list) -> tuple:
    """(Scores, the trajectories with the routing that the learner itself chooses for every token); one process.

    Layers without experts have zeros, as SGLang's do.
    """
    recorders = [Recorder() for _ in free.policy_chunks[0].decoder.layers]
    for layer, recorder in zip(free.policy_chunks[0].decoder.layers, recorders, strict=True):
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.router_replay = recorder
    scores = free.score(trajectories)
    [batch] = [batch.source for batch in local_batches(trajectories, free.config)]
    nothing = np.zeros((len(batch.tokens), free.hf_config["num_experts_per_tok"]), np.int64)
    experts = np.concatenate([getattr(recorder, "experts", nothing) for recorder in recorders], 1).astype(np.uint8)
    ends = np.cumsum([len(t) for t in batch.trajectories])  # one process packs without gaps
    rows = {t.id: experts[end - len(t):end] for t, end in zip(batch.trajectories, ends, strict=True)}
    return scores, [with_routing(t, rows[t.id]) for t in trajectories]


def with_routing(trajectory, experts, recorded=None):
    recorded = np.ones(len(trajectory), bool) if recorded is None else recorded
    return replace(trajectory, routing=Routing(experts, recorded))


def refusal(learner: Trainer, trajectory, experts) -> str:
    try:
        learner.score([with_routing(trajectory, experts)])
    except RunError as error:
        return str(error)
    return "not refused"


def apart(scores: list, others: list) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(scores, others, strict=True))


def one_process(model_dir: Path, parallel, trajectories: list) -> dict:
    """Differences of log-probs by what was replayed, and refusals."""
    free, learner = (make_learner(model_dir, parallel, 10_000, replay) for replay in (False, True))
    scores, own = own_routing(free, trajectories)
    worst = {"own": own, "other": [with_routing(t, (t.routing.experts + 1) % 8) for t in own],
             "not recorded": [with_routing(t, t.routing.experts * 0, np.zeros(len(t), bool)) for t in own]}
    (model_dir / "other.pkl").write_bytes(pickle.dumps((worst["other"], learner.score(worst["other"]))))
    for name, changed in worst.items():
        worst[name] = apart(learner.score(changed), scores)
    first, experts = own[0], own[0].routing.experts
    worst["refusals"] = {"equal": refusal(learner, first, experts * 0), "large": refusal(learner, first, experts + 8),
                         "narrow": refusal(learner, first, experts[:, 1:])}
    return worst | {"id": first.id}


def held_together(learner: Trainer, trajectories: list) -> int:
    """Recorded choices (of one layer, of one token) that all ranks together hold after the routing was dealt."""
    shares = learner.replay.deal(local_micro_batches(trajectories, learner.config), trajectories)
    layers = sum(columns.stop - columns.start for columns in learner.replay.columns)
    layers //= learner.hf_config["num_experts_per_tok"]
    held = torch.tensor(sum(int(share.recorded.sum()) for share in shares) * layers)
    dist.all_reduce(held)
    return int(held)


def main(folder: Path, layouts: list[dict]) -> None:
    data = pickle.loads((folder / "data.pkl").read_bytes())
    recorded = sum(int(t.routing.recorded.sum()) for t in data["trajectories"] if t.routing is not None)
    if int(os.environ["RANK"]):  # as in a run: only rank 0 leases trajectories with their routing
        data["trajectories"] = [replace(t, routing=None) for t in data["trajectories"]]
    expected, hf_config = dict(np.load(folder / "gradients.npz")), hf.read_config(folder / "model")
    results = {}
    for spec in layouts:
        spec = dict(spec)
        name, budget = spec.pop("name"), spec.pop("budget")
        parallel = configs.ParallelSection(ranks=int(os.environ["WORLD_SIZE"]), **spec)
        runtime.initialize(parallel, seed=0)
        gradients, *_ = policy_gradients(hf_config, hf.SafetensorsFolder(folder / "model"), parallel, data, budget,
                                         RoutingReplay)
        learner = make_learner(folder / "model", parallel, budget)
        scores = learner.score(data["trajectories"])
        results[name] = dict(
            held=held_together(learner, data["trajectories"]), recorded=recorded * hf_config["num_hidden_layers"],
            gradient={k: float(np.linalg.norm(gradients[k] - v) / (np.linalg.norm(v) or 1.0))
                      for k, v in expected.items()},
            logprob=apart(scores, data["logprobs"]))
        if name in ("pp2", "pp2 vpp2"):  # the first run of layers has one without experts; with vpp, nothing else
            changed, one_rank = pickle.loads((folder / "deepseek_v3" / "other.pkl").read_bytes())
            if dist.get_rank():
                changed = [replace(t, routing=None) for t in changed]
            scores = make_learner(folder / "deepseek_v3", parallel, budget).score(changed)
            results[f"{name}, deepseek_v3"] = dict(gradient={}, logprob=apart(scores, one_rank))
        if parallel.ranks == 1 and "one process, model" not in results:
            for model in ("model", "deepseek_v3"):
                results[f"one process, {model}"] = one_process(folder / model, parallel, data["trajectories"])
    if dist.get_rank() == 0:
        (folder / f"results-{dist.get_world_size()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    dist.destroy_process_group()
