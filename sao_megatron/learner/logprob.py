"""The one-pass head: log-probs, objective and gradients from hidden states, on vocabulary shards.

A token's coefficient depends only on its own log-prob, and N is known before the forward. So each chunk of action
tokens is finished at once: logits on this rank's vocabulary shard, log-prob, coefficient, and the gradients of hidden
states and head weight. No logits outlive their chunk, nothing is recomputed in the backward, and a token whose
coefficient is 0 costs nothing there. A chunk is one float32 buffer: logits, then exponentials, then d loss/d logits.

Tensor parallel ranks exchange one small gather per chunk: each rank's maximum, sum of exponentials, target logit and
entropy term. All combine the same numbers in the same order, so all end with bitwise the same log-probs and hence the
same mask. The gather runs while the next chunk's product does; then two chunks are in memory, not one.

The weight's gradient can go straight into Megatron's `main_grad`, in the forward (`into_main_grad`). That is safe:
- a pass without gradient adds nothing, and every forward with gradient has its backward before the optimizer steps;
- DDP starts to reduce a bucket in the last micro-batch's backward, after each of its weights has been through one; the
  head's own forwards, of all micro-batches of every pipeline schedule, come before that;
- Megatron divides by N after all of them. Only a scale put on the loss afterwards would be missed, so the backward
  checks that there is none. float32 and bfloat16 need no loss scaling.

An objective whose coefficients depend on whole trajectories uses the same code in two passes over the chunks.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sao_megatron.algorithm.objective import Objective

LOGITS_BYTES = {"cpu": 192 * 2**20, "cuda": 1024 * 2**20}
"""Memory for logits. Each chunk reads and writes the weight's whole gradient, which a GPU hides behind the products of
about a thousand tokens, a CPU behind those of 250."""
_BLOCK_BYTES = 16 * 2**20
"""Element-wise work goes through a chunk in blocks: their temporaries stay small, and in a CPU's cache."""


@dataclass(frozen=True)
class HeadOutput:
    loss: Tensor
    """−Σ c_t·log π_θ(x_t) − entropy_coef·Σ H_t, a sum over this micro-batch's action tokens; carries the gradient."""
    logprobs: Tensor
    """float32 [n], detached."""
    entropy: Tensor
    """float32 [n], detached: entropy of the whole next-token distribution, in nats."""


def one_pass_head(hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective, group: dist.ProcessGroup,
                  temperature: float = 1.0, into_main_grad: bool = False,
                  logits_bytes: int | None = None) -> HeadOutput:
    """Loss and gradients of `objective` for n action tokens.

    hidden: [n, h], the same on every rank of `group`; its gradient is this shard's part, to be summed over the group
    by whoever gathered it. weight: [V/tp, h], this rank's vocabulary shard. targets: int64 [n], ids in [0, V).
    into_main_grad: add the weight's gradient to `weight.main_grad` now, not to `weight.grad` in the backward; then the
    backward raises RuntimeError if it is handed any other gradient of the loss than 1.
    logits_bytes: memory for all logits alive at one time, LOGITS_BYTES by default.
    """
    logits_bytes = logits_bytes or LOGITS_BYTES[hidden.device.type]
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return HeadOutput(*_OnePassHead.apply(hidden, weight, targets, objective, group, temperature,
                                          into_main_grad, logits_bytes, trains))


class _OnePassHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, objective, group, temperature, into_main_grad, logits_bytes, trains):
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if trains else None
        grad_weight = None
        if trains and weight.requires_grad:
            grad_weight = weight.main_grad if into_main_grad else torch.zeros_like(weight, dtype=torch.float32)
        logprobs, entropies = [], []
        chunks = (hidden, weight, targets, group, temperature, logits_bytes)
        known = _coefficients_of_all(objective, *chunks)
        for chunk in _chunks(*chunks):
            coefficients = objective.coefficients(chunk.logprobs, chunk.rows.start) if known is None else (
                known[chunk.rows])
            loss -= (coefficients * chunk.logprobs).sum() + objective.entropy_coef * chunk.entropy.sum()
            logprobs.append(chunk.logprobs)
            entropies.append(chunk.entropy)
            if trains:
                chunk.add_gradients(coefficients, objective.entropy_coef, grad_hidden[chunk.rows], grad_weight)
        ctx.weight, ctx.into_main_grad = weight, into_main_grad
        ctx.save_for_backward(grad_hidden, None if into_main_grad else grad_weight)
        empty = loss.new_zeros(0)
        outputs = loss, torch.cat([empty, *logprobs]), torch.cat([empty, *entropies])
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, grad_loss, _logprobs, _entropy):
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.into_main_grad:
            torch._assert_async(grad_loss == 1, "one_pass_head: the loss was scaled after its weight gradient went "
                                                "into main_grad: scale the coefficients, or use into_main_grad=False")
            grad_weight = _already_in_main_grad(ctx.weight)
        else:
            grad_hidden = grad_hidden * grad_loss
            grad_weight = None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight.dtype)
        return grad_hidden, grad_weight, *[None] * 7


def _already_in_main_grad(weight: Tensor) -> Tensor | None:
    """The gradient to hand to autograd for a weight whose true one is in main_grad.

    As in Megatron's own fused accumulation: where DDP has marked the weight, its hook must see some gradient (it
    refuses None when it overlaps the reduction), then drops it because of `grad_added_to_main_grad`. It sees the
    weight itself, which takes no memory; nothing may add to that before the hook drops it, and nothing does. Of a
    weight shared with the embedding (`zero_out_wgrad`) the hook adds what it sees, which is then the embedding's.
    """
    if not hasattr(weight, "grad_added_to_main_grad") or getattr(weight, "zero_out_wgrad", False):
        return None
    weight.grad_added_to_main_grad = True
    return weight.detach()


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup, temperature: float,
            logits_bytes: int) -> Iterator[_Chunk]:
    """All chunks in order; each is valid until the next is asked for."""
    ahead = 1 if group.size() > 1 else 0
    size = max(1, logits_bytes // (4 * len(weight) * (1 + ahead)))
    starts = range(0, len(targets), size)
    buffers = [torch.empty(min(size, len(targets)), len(weight), dtype=torch.float32, device=hidden.device)
               for _ in starts[:1 + ahead]]
    begun: deque[_Chunk] = deque()
    for index, start in enumerate(starts):
        rows = slice(start, min(start + size, len(targets)))
        begun.append(_Chunk(rows, hidden, weight, targets, group, temperature, buffers[index % len(buffers)]))
        if len(begun) > ahead:
            yield begun.popleft().finish()
    for chunk in begun:
        yield chunk.finish()


def _coefficients_of_all(objective: Objective, *chunks) -> Tensor | None:
    """Coefficients [n] where they depend on whole trajectories: a first pass for the log-probs. None otherwise."""
    if not objective.needs_sequences:
        return None
    logprobs = [chunk.logprobs for chunk in _chunks(*chunks)]
    return objective.coefficients(torch.cat([torch.empty(0, device=chunks[0].device), *logprobs]), 0)


class _Chunk:
    """Softmax of one chunk on this vocabulary shard, kept as exponentials until its gradients are taken."""

    def __init__(self, rows: slice, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup,
                 temperature: float, buffer: Tensor):
        self.rows, self.weight, self.temperature = rows, weight, temperature
        self.hidden = hidden[rows]
        local = targets[rows] - group.rank() * len(weight)
        self.is_local = (local >= 0) & (local < len(weight))
        self.local_target = local.clamp(0, len(weight) - 1)
        self.exponentials = buffer[:len(local)]
        self.block = max(1, _BLOCK_BYTES // (4 * len(weight)))
        _multiply(self.hidden, weight.t(), out=self.exponentials)
        self.own = self._exponentiate()
        self.gathered, self.gather = self.own, None
        if group.size() > 1:
            self.gathered = self.own.new_empty(4 * group.size(), len(local))
            self.gather = dist.all_gather_into_tensor(self.gathered, self.own, group=group, async_op=True)

    def _exponentiate(self) -> Tensor:
        """Turn logits z into e = exp(z − max z), in place. Returns [4, rows]: max z, Σ e, Σ e·(z − max z), z_y or 0."""
        sums = []
        for z, target, is_local in _split(self.block, self.exponentials, self.local_target, self.is_local):
            if self.temperature != 1.0:
                z /= self.temperature
            target_logit = z.gather(1, target[:, None])[:, 0].where(is_local, 0.0)
            maximum = z.amax(-1)
            e = z.sub_(maximum[:, None]).exp()
            sums.append(torch.stack([maximum, e.sum(-1), z.mul_(e).sum(-1), target_logit]))
            z.copy_(e)
        return torch.cat(sums, dim=1)

    def finish(self) -> _Chunk:
        """Wait for the other shards' sums; sets `logprobs` and `entropy`, float32 [rows]."""
        if self.gather is not None:
            self.gather.wait()
        maxima, totals, weighted, target_logit = self.gathered.unflatten(0, (-1, 4)).unbind(1)  # [tp, rows] each
        maximum = maxima.amax(0)
        shift = maxima - maximum
        total = (totals * shift.exp()).sum(0)
        log_total = total.log()
        self.logprobs = target_logit.sum(0) - maximum - log_total
        self.entropy = log_total - ((weighted + totals * shift) * shift.exp()).sum(0) / total
        self.to_probability = (self.own[0] - maximum).exp() / total
        return self

    def add_gradients(self, coefficients: Tensor, entropy_coef: float, grad_hidden: Tensor,
                      grad_weight: Tensor | None) -> None:
        """Put d loss/d hidden into `grad_hidden` (this chunk's rows), add d loss/d weight to `grad_weight`, and use up
        the exponentials."""
        if entropy_coef:
            kept = torch.arange(len(coefficients), device=coefficients.device)
        else:
            kept = self._move_kept_to_front(coefficients)
        if not len(kept):
            return
        grad, coefficients = self.exponentials[:len(kept)], coefficients[kept] / self.temperature
        # d(−c·log p_y)/d logit_j = c·(p_j − 1{j=y});  d(−H)/d logit_j = p_j·(log p_j + H)
        if entropy_coef:
            grad *= self.to_probability[:, None]
            beta = entropy_coef / self.temperature
            for p, c, entropy in _split(self.block, grad, coefficients, self.entropy):
                p_log_p = torch.special.entr(p).neg_()
                p.mul_((c + beta * entropy)[:, None]).add_(p_log_p, alpha=beta)
        else:
            grad *= (coefficients * self.to_probability[kept])[:, None]
        grad.scatter_add_(1, self.local_target[kept, None], -(coefficients * self.is_local[kept])[:, None])
        grad = grad.to(self.hidden.dtype)
        grad_hidden[kept] = grad @ self.weight
        if grad_weight is not None:
            _add_product(grad_weight, grad.t(), self.hidden[kept])

    def _move_kept_to_front(self, coefficients: Tensor) -> Tensor:
        """Fill the rows of dropped tokens with those of kept ones from the end. Returns [kept]: which token the row
        now belongs to. On a GPU the host waits here: the number of kept tokens is the size of the products."""
        kept = coefficients.nonzero()[:, 0]
        order = torch.arange(len(kept), device=kept.device)
        holes = (coefficients[:len(kept)] == 0).nonzero()[:, 0]
        tail = kept[len(kept) - len(holes):]
        for to, source in _split(self.block, holes, tail):
            self.exponentials[to] = self.exponentials[source]
        order[holes] = tail
        return order


def _split(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b. Of bfloat16 a GPU keeps the float32 sums; the CPU has no such product and rounds them once."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(a @ b)


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, accumulated in out's dtype."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
