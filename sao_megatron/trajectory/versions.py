"""Weight versions: which learner made the weights, and how many policy updates they include, in one number.

The version of weights is generation · 1,000,000 + updates. A run's first learner is generation 0, so that its versions
just count updates; one that starts again from a checkpoint is the next generation. A number is therefore never used for
two different sets of weights, although the new learner makes updates again that its predecessor had made after the
checkpoint.

Staleness counts updates: the lag of a token is the updates in the learner's weights minus those in the weights that
sampled it, whichever generation these are from. That is the right measure across a restart because a learner that
starts again trains the lost steps in the same batches (`Store.rewind`): its weights after n updates are the lost ones
up to the rounding of the arithmetic, and bit for bit where that is deterministic, as on a CPU.
"""
from __future__ import annotations

import numpy as np

GENERATION = 1_000_000


def version_of(generation: int, updates: int) -> int:
    """The version of weights after `updates` policy updates of a run, made by learner `generation`."""
    return generation * GENERATION + updates


def updates_in[Version: (int, np.ndarray)](version: Version) -> Version:
    """Policy updates in the weights of a version (of each, for an array)."""
    return version % GENERATION


def lag(version: int, sampled: np.ndarray) -> np.ndarray:
    """Updates in the learner's weights `version` minus those in the weights that sampled each token; [n].

    0 where the sampling weights had more, as when a recorded stream is replayed in other batches.
    """
    return np.maximum(updates_in(version) - updates_in(sampled), 0)
