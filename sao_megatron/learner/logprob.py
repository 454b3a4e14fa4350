"""The one-pass head: log-probs, objective and gradients from hidden states, on vocabulary shards.

A token's coefficient depends only on its own log-prob, and N is known before the forward. So each chunk of action
tokens is finished at once: logits on this rank's vocabulary shard, log-prob, coefficient, and the gradients of hidden
states and head weight. No logits outlive their chunk, nothing is recomputed in the backward, and a token whose
coefficient is 0 costs nothing there. Tensor parallel ranks exchange two small reductions per chunk (maximum; then sum,
target logit and entropy term packed), so all of them end with bitwise the same log-probs and hence the same mask.
An objective whose coefficients depend on whole trajectories uses the same code in two passes over the chunks.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sao_megatron.algorithm.objective import Objective


@dataclass(frozen=True)
class HeadOutput:
    loss: Tensor
    """−Σ c_t·log π_θ(x_t) − entropy_coef·Σ H_t, a sum over this micro-batch's action tokens; carries the gradient."""
    logprobs: Tensor
    """float32 [n], detached."""
    entropy: Tensor
    """float32 [n], detached: entropy of the whole next-token distribution, in nats."""


def one_pass_head(hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective, group: dist.ProcessGroup,
                  temperature: float = 1.0, chunk_tokens: int = 1024) -> HeadOutput:
    """Loss and gradients of `objective` for n action tokens.

    hidden: [n, h], the same on every rank of `group`; its gradient is this shard's part, to be summed over the group
    by whoever gathered it. weight: [V/tp, h], this rank's vocabulary shard. targets: int64 [n], ids in [0, V).
    """
    return HeadOutput(*_OnePassHead.apply(hidden, weight, targets, objective, group, temperature, chunk_tokens))


class _OnePassHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, objective, group, temperature, chunk_tokens):
        needs_grad = hidden.requires_grad or weight.requires_grad
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        logprobs, entropies = [], []
        known = _whole(hidden, weight, targets, objective, group, temperature, chunk_tokens)
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk = _Chunk(hidden[rows], weight, targets[rows], group, temperature)
            coefficients = objective.coefficients(chunk.logprobs, start) if known is None else known[rows]
            loss -= (coefficients * chunk.logprobs).sum() + objective.entropy_coef * chunk.entropy.sum()
            logprobs.append(chunk.logprobs)
            entropies.append(chunk.entropy)
            if needs_grad:
                chunk.add_gradients(coefficients, objective.entropy_coef, grad_hidden[rows], grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        empty = loss.new_zeros(0)
        outputs = loss, torch.cat([empty, *logprobs]), torch.cat([empty, *entropies])
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, grad_loss, _logprobs, _entropy):
        grad_hidden, grad_weight = ctx.saved_tensors
        return ((grad_hidden * grad_loss).to(ctx.dtypes[0]), (grad_weight * grad_loss).to(ctx.dtypes[1]),
                None, None, None, None, None)


def _whole(hidden, weight, targets, objective: Objective, group, temperature: float, chunk_tokens: int):
    """Coefficients [n] where they depend on whole trajectories: a first pass for the log-probs. None otherwise."""
    if not objective.needs_sequences:
        return None
    chunks = [slice(start, start + chunk_tokens) for start in range(0, len(targets), chunk_tokens)]
    logprobs = [_Chunk(hidden[rows], weight, targets[rows], group, temperature).logprobs for rows in chunks]
    return objective.coefficients(torch.cat([hidden.new_zeros(0, dtype=torch.float32), *logprobs]), 0)


class _Chunk:
    """Softmax of one chunk on this vocabulary shard, kept as exponentials until its gradients are taken."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, group, temperature: float):
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        logits = (hidden @ weight.t()).float()
        if temperature != 1.0:
            logits /= temperature
        maximum = logits.amax(-1)
        _all_reduce(maximum, dist.ReduceOp.MAX, group)
        logits -= maximum[:, None]
        self.local_target = targets - group.rank() * len(weight)
        self.is_local = (self.local_target >= 0) & (self.local_target < len(weight))
        self.local_target = self.local_target.clamp(0, len(weight) - 1)
        target_logit = logits.gather(1, self.local_target[:, None])[:, 0] * self.is_local
        self.exponentials = logits.exp()
        # Σe, the target's logit, and Σ e·logit for the entropy, in one reduction
        sums = torch.stack([self.exponentials.sum(-1), target_logit, (self.exponentials * logits).sum(-1)])
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        self.total, target_logit, weighted = sums
        log_total = self.total.log()
        self.logprobs = target_logit - log_total
        self.entropy = log_total - weighted / self.total
        self.log_total, self.logits = log_total, logits

    def add_gradients(self, coefficients: Tensor, entropy_coef: float, grad_hidden: Tensor, grad_weight: Tensor):
        """Add d loss/d hidden to `grad_hidden` (this chunk's rows) and d loss/d weight to `grad_weight`, in place."""
        keep = slice(None) if entropy_coef else coefficients.nonzero()[:, 0]
        coefficients = coefficients[keep]
        if not len(coefficients):
            return
        # d(−c·log p_y)/d logit_j = c·(p_j − 1{j=y});  d(−H)/d logit_j = p_j·(log p_j + H)
        probabilities = self.exponentials[keep].div_(self.total[keep, None])
        grad = probabilities * coefficients[:, None]
        if entropy_coef:
            log_p = self.logits - self.log_total[:, None]
            grad += entropy_coef * probabilities * (log_p + self.entropy[:, None])
        grad.scatter_add_(1, self.local_target[keep, None], -(coefficients * self.is_local[keep])[:, None])
        grad = (grad / self.temperature).to(self.hidden.dtype)
        grad_hidden[keep] += (grad @ self.weight).float()
        grad_weight += (grad.t() @ self.hidden[keep]).float()


def _all_reduce(tensor: Tensor, op, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
