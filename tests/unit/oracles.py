"""The algorithm a second time, written to be checked by eye: ALGORITHM.md §1, §2, §3, §5, §7, §8 in NumPy float64.

Nothing here is shared with the package: other formulas (sums instead of recursions), other data layouts (whole token
sequences instead of flat action tokens), loops instead of vector code. Where the two disagree, one of them is wrong.
"""
from __future__ import annotations

import math

import numpy as np

KEPT, DROPPED_LOW, DROPPED_HIGH, RECOVERED = range(4)


def band(eps_low: float, eps_high: float) -> tuple[np.float32, np.float32]:
    """log(1 − ε_l) and log(1 + ε_h): the document compares log-ratios in float32, so the bounds are float32 too."""
    return np.float32(math.log(1 - eps_low)), np.float32(math.log(1 + eps_high))


# §1 and §8: one token at a time -------------------------------------------------------------------------------------

def dis_token(log_ratio: float, eps_low: float, eps_high: float) -> tuple[float, int]:
    """f(r) and the token's fate. Both bounds are strict; r is exponentiated only where it is accepted."""
    low, high = band(eps_low, eps_high)
    if np.float32(log_ratio) <= low:
        return 0.0, DROPPED_LOW
    if np.float32(log_ratio) >= high:
        return 0.0, DROPPED_HIGH
    return math.exp(log_ratio), KEPT


def dis_recover_token(log_ratio: float, advantage: float, eps_low: float, eps_high: float) -> tuple[float, int]:
    """f(r, Â) of recovering DIS: a dropped token whose update brings the ratio back is kept at a fixed weight."""
    weight, fate = dis_token(log_ratio, eps_low, eps_high)
    if fate == DROPPED_LOW and advantage > 0:
        return 1 - eps_low, RECOVERED
    if fate == DROPPED_HIGH and advantage < 0:
        return 1.0, RECOVERED
    return weight, fate


def gate(log_ratios, advantages, eps_low, eps_high, recover=False) -> tuple[np.ndarray, np.ndarray]:
    """Weights float64 [n] and fates int [n] of DIS or of recovering DIS."""
    weights, fates = np.zeros(len(log_ratios)), np.zeros(len(log_ratios), int)
    for t, (log_ratio, advantage) in enumerate(zip(log_ratios, advantages, strict=True)):
        weights[t], fates[t] = (dis_recover_token(log_ratio, advantage, eps_low, eps_high) if recover
                                else dis_token(log_ratio, eps_low, eps_high))
    return weights, fates


def coefficients(log_ratios, advantages, eps_low, eps_high, recover=False, anchor=0.0) -> np.ndarray:
    """c [n] of the loss −Σ sg[c]·log π: f·Â, and −τ·log r for the anchor (its loss gradient is +τ·log r·∇log π)."""
    weights, _ = gate(log_ratios, advantages, eps_low, eps_high, recover)
    return weights * np.asarray(advantages, float) - anchor * np.asarray(log_ratios, float)


# The loss on explicit logits: hidden states and head are the caller's business ----------------------------------------

def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis of [n, V]."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def policy_loss(logits: np.ndarray, targets: np.ndarray, fixed_coefficients: np.ndarray) -> float:
    """L = −(1/N) Σ c_t·log π(x_t) with N = all n action tokens, dropped ones included, and c held fixed (sg)."""
    logprobs = log_softmax(logits)
    total = sum(c * logprobs[t, x] for t, (c, x) in enumerate(zip(fixed_coefficients, targets, strict=True)))
    return -total / len(targets)


def policy_loss_gradient(logits: np.ndarray, targets: np.ndarray, fixed_coefficients: np.ndarray) -> np.ndarray:
    """dL/dlogits [n, V]: −(c_t/N)·(onehot(x_t) − π_t)."""
    gradient = np.exp(log_softmax(logits))
    for t, target in enumerate(targets):
        gradient[t, target] -= 1
        gradient[t] *= fixed_coefficients[t] / len(targets)
    return gradient


# §2: on the whole token sequence, observations included ---------------------------------------------------------------

def adaptive_lambda(num_actions: int, alpha: float) -> float:
    """λ = 1 − 1/(α·n), clamped to [0, 1]."""
    return min(max(1 - 1 / (alpha * num_actions), 0.0), 1.0)


def state_values(action_mask, head_outputs, bootstrap: bool) -> list[float]:
    """V_0 … V_n of one sequence: the head's output one token before each action, then the value after the end.

    V_n is 0, or with `bootstrap` the head's output at the last token, whatever kind of token that is.
    """
    values = [float(head_outputs[t - 1]) for t in range(len(action_mask)) if action_mask[t]]
    return [*values, float(head_outputs[-1]) if bootstrap else 0.0]


def action_rewards(action_mask, rewards) -> list[float]:
    return [float(rewards[t]) for t in range(len(action_mask)) if action_mask[t]]


def skip_observation_gae(action_mask, rewards, head_outputs, lam, gamma=1.0, bootstrap=False) -> np.ndarray:
    """Â_k = Σ_{j ≥ k} (γλ)^{j−k}·δ_j with δ_j = ρ_j + γ·V_{j+1} − V_j, over action tokens only; float64 [n]."""
    values, rho = state_values(action_mask, head_outputs, bootstrap), action_rewards(action_mask, rewards)
    delta = [rho[j] + gamma * values[j + 1] - values[j] for j in range(len(rho))]
    return np.array([sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(rho))) for k in range(len(rho))])


def reward_to_go(action_mask, rewards, gamma=1.0, last_value=0.0) -> np.ndarray:
    """R_k = Σ_{j ≥ k} γ^{j−k}·ρ_j + γ^{n−k}·V_n; float64 [n]."""
    rho = action_rewards(action_mask, rewards)
    n = len(rho)
    return np.array([sum(gamma ** (j - k) * rho[j] for j in range(k, n)) + gamma ** (n - k) * last_value
                     for k in range(n)])


def group_advantage(outcomes, groups, eps=1e-6) -> np.ndarray:
    """(R − mean)/(population standard deviation + eps), each within the rollouts of its own group; float64 [m]."""
    result = np.zeros(len(outcomes))
    for i, group in enumerate(groups):
        mine = np.array([float(r) for r, g in zip(outcomes, groups, strict=True) if g == group])
        result[i] = (outcomes[i] - mine.mean()) / (math.sqrt(((mine - mine.mean()) ** 2).mean()) + eps)
    return result


def whiten(advantages, eps=1e-6) -> np.ndarray:
    """Zero mean and unit (population) standard deviation over all action tokens of the global batch."""
    advantages = np.asarray(advantages, float)
    centred = advantages - advantages.mean()
    return centred / (math.sqrt((centred ** 2).mean()) + eps)


def step_gae(level, turns, rewards, values, alpha, last_value=0.0) -> np.ndarray:
    """GAE over the turns of one trajectory, given per action token; every token gets its turn's advantage."""
    steps = sorted(set(turns))
    at = {turn: [k for k, other in enumerate(turns) if other == turn] for turn in steps}
    value = [np.mean([values[k] for k in at[t]]) if level == "average" else values[at[t][-1]] for t in steps]
    mask, reward = [False] + [True] * len(steps), [0.0, *(sum(rewards[k] for k in at[t]) for t in steps)]
    advantage = skip_observation_gae(mask, reward, [*value, last_value], adaptive_lambda(len(steps), alpha),
                                     bootstrap=True)
    return np.array([advantage[steps.index(turn)] for turn in turns])


def running_mean(prompts, outcomes, per_prompt=8, overall=128) -> list[float]:
    """Reward minus the mean of the last 8 of the same prompt, else of the last 128 of all; 0 for the very first."""
    result = []
    for i, prompt in enumerate(prompts):
        same = [outcomes[j] for j in range(i) if prompts[j] == prompt][-per_prompt:]
        history = same or list(outcomes[:i])[-overall:]
        result.append(outcomes[i] - np.mean(history) if history else 0.0)
    return result


# §3 and §7: what is reported ------------------------------------------------------------------------------------------

def explained_variance(values, targets) -> float:
    """1 − Var[target − value]/Var[target]; NaN where all targets are equal."""
    targets, values = np.asarray(targets, float), np.asarray(values, float)
    variance = targets.var()
    return float("nan") if variance == 0 else 1 - (targets - values).var() / variance


def effective_sample_size(weights) -> float:
    """(Σf)²/(N·Σf²) over all N action tokens, in [0, 1]; 0 where every token is dropped."""
    squares = sum(float(f) ** 2 for f in weights)
    return sum(float(f) for f in weights) ** 2 / (len(weights) * squares) if squares else 0.0


def discarded_mass(log_ratios, fates) -> float:
    """m = 1 − E[r·1{kept}], the mean over all action tokens."""
    kept = [math.exp(x) for x, fate in zip(log_ratios, fates, strict=True) if fate == KEPT]
    return 1 - sum(kept) / len(log_ratios)


# §3: the value model's losses -----------------------------------------------------------------------------------------

def clipped_squared_error(value: float, target: float, first_value: float, clip: float | None) -> float:
    """PPO's value loss of one token: the worse of the value and of the value held within `clip` of the first one."""
    if clip is None:
        return (value - target) ** 2
    near = min(max(value, first_value - clip), first_value + clip)
    return max((value - target) ** 2, (near - target) ** 2)


def hl_gauss_target(target: float, bins: int, low: float, high: float, sigma_ratio: float) -> np.ndarray:
    """Mass of N(target, σ²), σ = sigma_ratio·bin width, in each of `bins` equal bins of [low, high], summing to 1."""
    width = (high - low) / bins
    cdf = [0.5 * (1 + math.erf((low + i * width - target) / (sigma_ratio * width * math.sqrt(2))))
           for i in range(bins + 1)]
    mass = np.array([cdf[i + 1] - cdf[i] for i in range(bins)])
    return mass / mass.sum()


def hl_gauss_value(logits: np.ndarray, low: float, high: float) -> float:
    """Mean of the bins' centres under the softmax of one token's logits."""
    width = (high - low) / len(logits)
    return sum(math.exp(p) * (low + (i + 0.5) * width) for i, p in enumerate(log_softmax(logits)))


def hl_gauss_loss(logits: np.ndarray, target: float, low: float, high: float, sigma_ratio: float) -> float:
    """Cross-entropy of one token: −Σ p_i·log q_i."""
    wanted = hl_gauss_target(target, len(logits), low, high, sigma_ratio)
    return -sum(p * q for p, q in zip(wanted, log_softmax(logits), strict=True))
