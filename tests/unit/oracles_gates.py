"""The losses of the other systems (ALGORITHM.md §5) in NumPy float64, beside oracles.py and as independent.

Where a system has a loss that can be differentiated, the loss is written here and its derivative is taken numerically;
what a gate does on and beyond its bounds is written token by token.
"""
from __future__ import annotations

import math

import numpy as np
from oracles import DROPPED_HIGH, DROPPED_LOW, KEPT, RECOVERED

LIMIT = 20.0  # unclipped log-ratios are exponentiated up to here


def f32log(x: float) -> float:
    """A bound as the float32 logarithm with which log-ratios are compared."""
    return float(np.float32(math.log(x))) if x > 0 else -math.inf


# Whole losses over the action tokens of `lengths` trajectories; every log-prob array is float64 [n] -------------------

def ppo_surrogate(log_ratio: float, advantage: float, eps_low: float, eps_high: float, dual_clip=None) -> float:
    """min(r·A, clip(r)·A), and for A < 0 no less than dual_clip·A."""
    ratio = math.exp(log_ratio)
    value = min(ratio * advantage, min(max(ratio, 1 - eps_low), 1 + eps_high) * advantage)
    return max(value, dual_clip * advantage) if dual_clip and advantage < 0 else value


def mismatch_weight(gate: str, mismatch: float, constants: dict) -> float:
    """What multiplies PPO's loss of a token: k = π_behaviour/π_rollout, truncated or masked."""
    if gate == "ppo_clip":
        return 1.0
    if gate == "icepop":
        return mismatch if constants["mismatch_low"] <= mismatch <= constants["mismatch_high"] else 0.0
    return min(mismatch, constants["mismatch_high"])


def token_ppo_loss(gate, logprobs, behaviour, rollout, advantages, lengths, constants) -> float:
    """−mean over tokens of weight × PPO surrogate."""
    band = {k: v for k, v in constants.items() if k in ("eps_low", "eps_high", "dual_clip")}
    return -np.mean([mismatch_weight(gate, math.exp(b - r), constants) * ppo_surrogate(p - b, a, **band)
                     for p, b, r, a in zip(logprobs, behaviour, rollout, advantages, strict=True)])


def gspo_loss(_gate, logprobs, behaviour, rollout, advantages, lengths, constants) -> float:
    """−mean over trajectories of the PPO surrogate of exp(mean log-ratio)."""
    cuts = np.cumsum(lengths)[:-1]
    ratios, firsts = np.split(logprobs - behaviour, cuts), [part[0] for part in np.split(advantages, cuts)]
    return -np.mean([ppo_surrogate(x.mean(), a, **constants) for x, a in zip(ratios, firsts, strict=True)])


def dpo_loss(_gate, logprobs, behaviour, rollout, advantages, lengths, constants) -> float:
    """Mean over pairs of −log σ(β·(log-ratio of the chosen − log-ratio of the rejected)); a tie loses nothing."""
    cuts, total = np.cumsum(lengths)[:-1], 0.0
    ratios = [part.sum() for part in np.split(logprobs - behaviour, cuts)]
    signs = [part[0] for part in np.split(advantages, cuts)]
    for i in range(0, len(lengths), 2):
        if signs[i]:
            chosen, rejected = (i, i + 1) if signs[i] > 0 else (i + 1, i)
            total += np.logaddexp(0.0, -constants["beta"] * (ratios[chosen] - ratios[rejected]))
    return total / (len(lengths) / 2)


def derivative(loss, logprobs: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences with respect to each log-prob."""
    result = np.zeros(len(logprobs))
    for t in range(len(logprobs)):
        there, back = logprobs.copy(), logprobs.copy()
        there[t] += step
        back[t] -= step
        result[t] = (loss(there) - loss(back)) / (2 * step)
    return result


# Token by token: (weight, fate), on the bounds and at any distance ---------------------------------------------------

def ppo_token(log_ratio, advantage, eps_low, eps_high, dual_clip=None) -> tuple[float, int]:
    """r where the unclipped branch is the minimum (ties included) and dual-clip does not bind."""
    low, high = f32log(1 - eps_low), f32log(1 + eps_high)
    clipped = min(max(log_ratio, low), high)
    if math.exp(log_ratio) * advantage > math.exp(clipped) * advantage:
        return 0.0, DROPPED_LOW if log_ratio < low else DROPPED_HIGH
    if dual_clip and advantage < 0 and log_ratio > f32log(dual_clip):
        return 0.0, DROPPED_HIGH
    return math.exp(min(log_ratio, LIMIT)), KEPT


def truncated_token(log_ratio, log_mismatch, advantage, mismatch_high, **ppo) -> tuple[float, int]:
    weight, fate = ppo_token(log_ratio, advantage, **ppo)
    limit = f32log(mismatch_high)
    if log_mismatch > limit:
        return weight * mismatch_high, RECOVERED if fate == KEPT else fate
    return weight * math.exp(log_mismatch), fate


def icepop_token(log_ratio, log_mismatch, advantage, mismatch_low, mismatch_high, **ppo) -> tuple[float, int]:
    if log_mismatch < f32log(mismatch_low):
        return 0.0, DROPPED_LOW
    if log_mismatch > f32log(mismatch_high):
        return 0.0, DROPPED_HIGH
    weight, fate = ppo_token(log_ratio, advantage, **ppo)
    return weight * math.exp(log_mismatch), fate


def cispo_token(log_ratio, eps_low, eps_high) -> tuple[float, int]:
    low, high = f32log(1 - eps_low), f32log(1 + eps_high)
    if low <= log_ratio <= high:
        return math.exp(log_ratio), KEPT
    return (1 - eps_low if log_ratio < low else 1 + eps_high), RECOVERED


def ipo_token(logprob, rollout, eps_low, eps_high) -> tuple[float, int]:
    """Probabilities are compared in float32, as the learner has them."""
    difference = np.exp(np.float32(logprob)) - np.exp(np.float32(rollout))
    if difference < -np.float32(eps_low):
        return 0.0, DROPPED_LOW
    if difference > np.float32(eps_high):
        return 0.0, DROPPED_HIGH
    return math.exp(min(np.float32(logprob) - np.float32(rollout), LIMIT)), KEPT


def binary_kl(rollout: np.ndarray, logprobs: np.ndarray) -> float:
    """Mean over one trajectory's tokens of KL(Bernoulli(π_rollout) ‖ Bernoulli(π_θ))."""
    p, q = (np.clip(np.exp(np.asarray(x, float)), 1e-6, 1 - 1e-6) for x in (rollout, logprobs))
    return float(np.mean(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))))
