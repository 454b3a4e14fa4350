"""The Trajectory: what flows from the rollout side to the training side (DESIGN.md §3)."""
from __future__ import annotations

import copy
import json
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from sao_megatron.trajectory.routing import Routing, merge

UNSAMPLED = -1  # version of a token that no engine sampled


class Status(StrEnum):
    COMPLETED = "completed"
    """Ended by itself."""
    TRUNCATED = "truncated"
    """Cut off by a token or turn budget; trained on (ALGORITHM.md §2)."""
    ERROR = "error"
    """The environment or a tool host failed; counted, never trained on."""


@dataclass(eq=False)
class Trajectory:
    """One rollout of one prompt: parallel arrays of one length T.

    Validates itself on construction; a ValueError names the trajectory and the field at fault.
    """

    tokens: np.ndarray
    """int32 [T]: prompt, action and observation tokens in order."""
    action_mask: np.ndarray
    """bool [T]: true where the token was sampled by the policy."""
    rollout_logprobs: np.ndarray
    """float32 [T]: log-prob under the engine that sampled it, at the rollout temperature; NaN elsewhere."""
    versions: np.ndarray
    """int32 [T]: weight version at sampling; −1 where not sampled."""
    turns: np.ndarray
    """int16 [T]: turn index; prompt tokens are turn 0, an observation belongs to the turn it answers."""
    rewards: np.ndarray
    """float32 [T]: zero except on action tokens; the outcome is on the last action token."""
    prompt_id: str
    task: str
    group_id: str = ""
    status: Status = Status.COMPLETED
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    info: dict[str, Any] = field(default_factory=dict)
    """Free, JSON-able: timings, task outcome, error text."""
    segments: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    """int32 [s]: where each segment begins. A rollout whose context was rewritten on the way is several sequences, each
    with the whole context that its action tokens were sampled from, and one outcome (ALGORITHM.md §2)."""
    routing: Routing | None = None
    """T rows: the experts that the engine chose, where rollout.routing_replay had them recorded."""

    def __post_init__(self):
        for name, dtype in _ARRAYS.items():
            array = np.asarray(getattr(self, name))
            if array.ndim != 1 or len(array) != len(self.tokens):
                self._fault(name, f"has shape {array.shape}, expected ({len(self.tokens)},), one entry per token")
            setattr(self, name, array.astype(dtype, copy=False))
        self.segments = np.asarray(self.segments, np.int32)
        if self.routing is not None and len(self.routing) != len(self.tokens):
            self._fault("routing", f"has {len(self.routing)} rows, expected {len(self.tokens)}, one per token")
        self.status = Status(self.status)
        if self.status is Status.ERROR:
            return
        action = self.action_mask
        if not action.any():
            self._fault("action_mask", "has no action token")
        if self.tokens.min() < 0:
            self._fault("tokens", f"has the negative id {self.tokens.min()}")
        starts = self.segments
        if not len(starts) or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= len(self):
            self._fault("segments", f"is {starts.tolist()}: expected ascending positions from 0 on, below {len(self)}")
        if action[starts].any():
            where = starts[action[starts]][0]
            self._fault("action_mask", f"marks token {where}, which nothing precedes: a prompt has at least one token")
        logprobs = self.rollout_logprobs[action]
        if not np.isfinite(logprobs).all():
            where = np.flatnonzero(action)[~np.isfinite(logprobs)][0]
            self._fault("rollout_logprobs", f"is not finite at position {where}, an action token")
        if (logprobs > 1e-3).any():
            self._fault("rollout_logprobs", f"is positive ({logprobs.max():.4g}): a log-prob is at most 0")
        if (self.versions[action] < 0).any():
            self._fault("versions", "is negative on an action token")
        if not np.isfinite(self.rewards).all():
            self._fault("rewards", "is not finite")
        if self.rewards[~action].any():
            self._fault("rewards", "is non-zero on a token that is not an action")

    def _fault(self, name: str, what: str):
        raise ValueError(f"trajectory {self.id} (task {self.task}, prompt {self.prompt_id}): {name} {what}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token id is outside [0, vocab_size)."""
        if self.tokens.max(initial=0) >= vocab_size:
            self._fault("tokens", f"has id {self.tokens.max()}, outside the vocabulary of {vocab_size}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @property
    def segment_lengths(self) -> np.ndarray:
        """int64 [s]: tokens of each segment."""
        return np.diff(np.append(self.segments, len(self)))

    @property
    def reward(self) -> float:
        """Sum of all rewards (the outcome, for outcome-only tasks)."""
        return float(self.rewards.sum())

    @property
    def action_versions(self) -> np.ndarray:
        """int32 [num_actions]."""
        return self.versions[self.action_mask]


_ARRAYS = {"tokens": np.int32, "action_mask": np.bool_, "rollout_logprobs": np.float32, "versions": np.int32,
           "turns": np.int16, "rewards": np.float32}


class TrajectoryBuilder:
    """Grows a trajectory token by token as an episode runs; nothing is ever re-tokenised."""

    def __init__(self, prompt_tokens: list[int], prompt_id: str, task: str, group_id: str = "",
                 record_routing: bool = False):
        self.record_routing = record_routing
        self._routing: list[tuple[slice, Routing]] = []
        self._routed = 0
        """Tokens before this position have their routing, or never will."""
        self.tokens: list[int] = list(prompt_tokens)
        self._logprobs = [np.nan] * len(self.tokens)
        self._versions = [UNSAMPLED] * len(self.tokens)
        self._turns = [0] * len(self.tokens)
        self._rewards = [0.0] * len(self.tokens)
        self._segments = [0]
        self.turn = 0
        self._identity = dict(prompt_id=prompt_id, task=task, group_id=group_id)

    def add_action(self, tokens: list[int], logprobs: list[float], versions: list[int],
                   routing: Routing | None = None) -> None:
        """Append sampled tokens with their log-probs and weight versions (three lists of one length).

        `routing` answers `wanted_routing`: rows up to the token before the last. Without it they are never recorded: a
        later prefill would route these tokens anew.
        """
        if not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(f"action of {len(tokens)} tokens came with {len(logprobs)} log-probs and "
                             f"{len(versions)} versions")
        self._extend(tokens, logprobs, versions)
        last = len(self.tokens) - 1
        if routing is not None:
            if len(routing) != last - self._routed:
                raise ValueError(f"{len(routing)} rows of routing came for the {last - self._routed} tokens from "
                                 f"{self._routed} on")
            self._routing.append((slice(self._routed, last), routing))
        if tokens:
            self._routed = last

    def last_action(self, length: int) -> tuple[list[int], list[float], list[int]]:
        """The last `length` tokens with their log-probs and versions."""
        start = len(self.tokens) - length
        return self.tokens[start:], self._logprobs[start:], self._versions[start:]

    def fork(self) -> TrajectoryBuilder:
        """A copy that grows by itself, for a turn that may come to nothing."""
        twin = copy.copy(self)
        vars(twin).update({name: list(value) for name, value in vars(self).items() if isinstance(value, list)})
        return twin

    def wanted_routing(self) -> dict[str, int]:
        """What to ask the engine for besides tokens, if routing is recorded: that of every token of the segment which
        has none yet."""
        return {"routing_from": self._routed - self._segments[-1]} if self.record_routing else {}

    def add_observation(self, tokens: list[int]) -> None:
        """Append the environment's answer and begin the next turn."""
        self._extend(tokens, [np.nan] * len(tokens), [UNSAMPLED] * len(tokens))
        self.turn += 1

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last action token so far."""
        for position in reversed(range(len(self.tokens))):
            if self._versions[position] != UNSAMPLED:
                self._rewards[position] += reward
                return
        raise ValueError("a reward came before any action token")

    def add_segment(self, other: TrajectoryBuilder) -> None:
        """Append what another builder holds as a new segment (or several); its turns continue this one's."""
        start, turn = len(self.tokens), self.turn
        self._segments += [start + begin for begin in other._segments]
        self._extend(other.tokens, other._logprobs, other._versions)
        self._turns[start:] = [turn + later for later in other._turns]
        self._rewards[start:] = other._rewards
        self._routing += [(slice(start + rows.start, start + rows.stop), part) for rows, part in other._routing]
        self._routed = start + other._routed
        self.turn = turn + other.turn

    @property
    def segment_tokens(self) -> list[int]:
        """Tokens of the last segment: the context of the next action."""
        return self.tokens[self._segments[-1]:]

    def _extend(self, tokens, logprobs, versions):
        self.tokens += tokens
        self._logprobs += logprobs
        self._versions += versions
        self._turns += [self.turn] * len(tokens)
        self._rewards += [0.0] * len(tokens)

    def build(self, status: Status = Status.COMPLETED, **info) -> Trajectory:
        versions = np.array(self._versions, np.int32)
        return Trajectory(tokens=np.array(self.tokens, np.int32), action_mask=versions != UNSAMPLED,
                          rollout_logprobs=np.array(self._logprobs, np.float32), versions=versions,
                          turns=np.array(self._turns, np.int16), rewards=np.array(self._rewards, np.float32),
                          status=status, info=info, segments=np.array(self._segments, np.int32),
                          routing=merge(self._routing, len(self.tokens)), **self._identity)


def encode(trajectory: Trajectory) -> bytes:
    """One blob: length of the JSON header (4 bytes, little-endian), header, then the arrays' bytes in order.

    Routing is the last two of them, where there is any; the header then has its width and dtype.
    """
    header = {name: getattr(trajectory, name) for name in ("prompt_id", "task", "group_id", "status", "id", "info")}
    header |= {"length": len(trajectory), "segments": trajectory.segments.tolist()}
    arrays = [getattr(trajectory, name) for name in _ARRAYS]
    if trajectory.routing is not None:
        experts = trajectory.routing.experts
        header |= {"routing": [experts.shape[1], experts.dtype.name]}
        arrays += [trajectory.routing.recorded, experts]
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *(np.ascontiguousarray(a).tobytes() for a in arrays)])


def decode(blob: bytes) -> Trajectory:
    """Inverse of `encode`; validates again."""
    start = 4 + int.from_bytes(blob[:4], "little")
    header = json.loads(blob[4:start])
    length, width_and_dtype = header.pop("length"), header.pop("routing", None)

    def take(dtype, count: int) -> np.ndarray:
        nonlocal start
        array = np.frombuffer(blob, dtype, count, start)
        start += array.nbytes
        return array
    arrays = {name: take(dtype, length) for name, dtype in _ARRAYS.items()}
    routing = None
    if width_and_dtype:
        width, dtype = width_and_dtype
        recorded = take(np.bool_, length)
        routing = Routing(take(dtype, length * width).reshape(length, width), recorded)
    return Trajectory(**arrays, **header, routing=routing)
