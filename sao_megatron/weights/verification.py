"""How we know that an engine serves what was published. SGLang answers success for names that it ignores.

Each check is for what the others cannot see:
- *own loading*, at the first publication of a run, where that is a checkpoint as it came: one engine first loads the
  folder by itself, and every engine must have the same hashes after the publication. So nothing is exchanged, cut or
  altered on any way from the folder through the learner to an engine.
- *coverage*, otherwise, once in an engine's life: its weights are overwritten with random numbers and published, twice;
  every tensor must have the same hash after both. A tensor, or an expert inside a fused one, that the publication does
  not reach, or reaches under a name that the engine does not know, keeps its random numbers and is named.
- *agreement*, at every verification: all engines hold the same hashes.
- *meaning*, at every verification: log-probs of a probe equal the learner's, so that tensors that arrived are also the
  right ones at the right place.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from sao_megatron.engine.client import EngineClient
from sao_megatron.errors import RunError
from sao_megatron.trajectory.types import Trajectory

Checksums = dict[str, str]


def check_coverage(url: str, first: Checksums, second: Checksums) -> None:
    """Raise RunError if the engine's weights after two publications of the same weights differ."""
    if differing := _differing(first, second):
        raise RunError(f"engine {url} does not get its whole model from a publication: {_some(differing)} kept what "
                       f"was there before, or came differently the second time; the names published are not those that "
                       f"the engine knows (its model class), or the transport changes bytes")


def check_own_loading(url: str, loader: str, folder: Path, own: Checksums, published: Checksums, tied: bool) -> None:
    """Raise RunError if an engine's weights after a publication are not those that engine `loader` loaded by itself.
    `tied`: the folder has no head of its own."""
    differing = [name for name in _differing(own, published) if not tied or not name.endswith(":lm_head.weight")]
    if differing:
        raise RunError(f"engine {url} does not hold the weights of {folder} after their publication, as engine "
                       f"{loader} did when it loaded them by itself: {_some(differing)} differ")


def check_agreement(urls: list[str], checksums: list[Checksums]) -> None:
    """Raise RunError if an engine holds other weights than the first one."""
    for url, other in zip(urls[1:], checksums[1:], strict=True):
        if differing := _differing(checksums[0], other):
            raise RunError(f"engines {urls[0]} and {url} hold different weights after the same publication: "
                           f"{_some(differing)}")


def check_meaning(url: str, served: int | None, version: int, scores: list[list[float]], expected: list[np.ndarray],
                  tolerance: float) -> float:
    """The largest mean difference (nats a token) between an engine's and the learner's log-probs of the probes.

    Raises RunError if it exceeds `tolerance`, or if the engine serves another version.
    """
    difference = max(float(np.abs(np.array(got) - want).mean()) for got, want in zip(scores, expected, strict=True))
    if served != version or not difference <= tolerance:
        raise RunError(f"engine {url} does not serve what was published: it reports version {served}, expected "
                       f"{version}; its log-probs of a probe differ by {difference:.2e} nats a token from the "
                       f"learner's (publication.tolerance {tolerance:g})")
    return difference


def probes(vocab_size: int, count: int = 4, length: int = 48) -> list[Trajectory]:
    """Random token sequences, the same on every rank and in every run, all but the first token to be scored."""
    rng = np.random.default_rng(0)
    scored = np.arange(length) > 0
    return [Trajectory(
        tokens=rng.integers(0, vocab_size, length), action_mask=scored, rollout_logprobs=np.where(scored, 0.0, np.nan),
        versions=np.where(scored, 0, -1), turns=np.zeros(length), rewards=np.zeros(length), prompt_id=f"probe-{i}",
        task="probe", id=f"probe-{i}") for i in range(count)]


async def ask(client: EngineClient, of: list[Trajectory]) -> tuple[int | None, list[list[float]], Checksums]:
    """An engine's version, log-probs of the probes, and checksums."""
    return (await client.model_version(), [await client.score(probe.tokens.tolist()) for probe in of],
            await client.checksums())


def _differing(first: Checksums, second: Checksums) -> list[str]:
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _some(names: list[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{', '.join(names[:count])}{more} (<rank>:<tensor, as the engine names it>)"
