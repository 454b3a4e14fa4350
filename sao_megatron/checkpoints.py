"""The checkpoints of a run, as files: runs/<name>/checkpoints/step-00000040/ and what lies in it.

A folder of that name is complete: it was written under another name (`step-00000040.partial-…`), brought to the disk,
and renamed. What a crash leaves is removed by the next learner. Each folder holds a distributed checkpoint of
Megatron-Core's (learner/checkpoint.py) and `state.json`, which says what the weights are, and holds a checksum of that.
"""
from __future__ import annotations

import json
import logging
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from sao_megatron.config import ParallelSection, RunConfig
from sao_megatron.errors import UserError
from sao_megatron.files import sync

FORMAT = 1
STATE = "state.json"
KEYS = {"format", "step", "updates", "parallel", "running_mean", "schedules", "hf_config", "config"}
"""What state.json of a run's checkpoint holds at least; a converted one's has no run to speak of."""
MAY_CHANGE = {"name", "runs_dir", "steps", "restarts", "parallel", "rollout", "evaluation", "engine", "publication",
              "checkpoint", "alarms", "tokens", "writers", "cluster", "sandbox"}
"""Keys of a config that a run may change when it goes on; `steps` moves the end of decaying learning rates with it."""
_COMPLETE = re.compile(r"step-(\d{8})")

log = logging.getLogger("checkpoints")


@dataclass(frozen=True)
class Checkpoint:
    """A complete one."""

    path: Path
    step: int
    """Learner steps that the weights include."""

    def state(self) -> dict:
        """What state.json says. Raises UserError if it is not whole, or not of this format."""
        state = read_state(self.path)
        if state.get("format", FORMAT) != FORMAT:
            raise UserError(f"checkpoint {self.path} has format {state['format']}, expected {FORMAT}: use the package "
                            f"version that wrote it")
        if missing := sorted(KEYS - state.keys()):
            raise _unreadable(self.path, f"no {', '.join(missing)}")
        return state


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, path: Path):
        self.path = path

    def complete(self) -> list[Checkpoint]:
        """Oldest first."""
        if not self.path.is_dir():
            return []
        found = [(child, _COMPLETE.fullmatch(child.name)) for child in self.path.iterdir()]
        return sorted((Checkpoint(child, int(match[1])) for child, match in found if match), key=lambda c: c.step)

    def latest(self) -> Checkpoint | None:
        return max(self.complete(), key=lambda c: c.step, default=None)

    def begin(self, step: int, generation: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; no other learner (`generation`) uses its name."""
        partial = self.path / f"step-{step:08d}.partial-{generation}"
        partial.mkdir(parents=True)
        sync(self.path.parent)  # else a power cut could take the folder of all checkpoints
        return partial

    def discard(self, partial: Path) -> None:
        """Remove what a save that failed has written: where the disk is full, the next one needs the room."""
        shutil.rmtree(partial, ignore_errors=True)

    def finish(self, partial: Path, state: dict, keep: int) -> None:
        """Write state.json, make the folder a checkpoint, and keep only the newest `keep` of them."""
        write_state(partial, state)
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        final = self.path / partial.name.partition(".")[0]
        if final.exists():  # of a learner whose later steps were lost
            self._remove(final)
        partial.rename(final)
        sync(self.path)
        for old in self.complete()[:-keep]:
            self._remove(old.path)

    def clean(self) -> None:
        """Remove what dead learners left unfinished."""
        for child in self.path.iterdir() if self.path.is_dir() else ():
            if not _COMPLETE.fullmatch(child.name):
                log.info("removing %s: its learner died while it was written or removed", child)
                shutil.rmtree(child, ignore_errors=True)  # its writer may still be dying

    def _remove(self, folder: Path) -> None:
        """First the name, so that half of a checkpoint never looks like one."""
        doomed = folder.with_name(folder.name + ".removed")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        if doomed.exists():  # a network file system keeps files that another process reads
            log.warning("%s could not be removed whole: the next learner of this run will try again", doomed)


def write_state(folder: Path, state: dict) -> None:
    """state.json of a checkpoint, with its checksum."""
    state = {"format": FORMAT} | state
    (folder / STATE).write_text(json.dumps(state | {"checksum": _checksum(state)}, indent=2) + "\n")


def read_state(folder: Path) -> dict:
    """What state.json of a checkpoint says; nothing where there is none. Raises UserError if it is not what was once
    written, where it says so: older ones have no checksum."""
    try:
        state = json.loads((folder / STATE).read_text()) if (folder / STATE).exists() else {}
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from None
    if not isinstance(state, dict):
        raise _unreadable(folder, f"expected a JSON object, found {type(state).__name__}")
    expected = state.pop("checksum", None)
    if expected not in (None, found := _checksum(state)):
        raise _unreadable(folder, f"damaged, or edited: its checksum is {found}, it says {expected}")
    return state


def _checksum(state: dict) -> str:
    return f"{zlib.crc32(json.dumps(state, sort_keys=True).encode()):08x}"


def _unreadable(folder: Path, reason: object) -> UserError:
    return UserError(f"checkpoint {folder} has no readable {STATE} ({reason}): take another one; a run goes on from an "
                     f"older one if this folder is removed")


def check_same_run(before: RunConfig, now: RunConfig) -> None:
    """Raise UserError naming the keys in which a run's config differs though it must not when the run goes on."""
    changed = list(_differences(*(config.model_dump(mode="json", exclude=MAY_CHANGE) | {
        "rollout": {"redundancy": config.rollout.redundancy}} for config in (before, now))))  # part of a group's size
    if changed:
        raise UserError(f"a run that goes on cannot change {', '.join(changed)}: start a new run for that "
                        f"(it may change {', '.join(sorted(MAY_CHANGE - {'name', 'runs_dir'}))})")


def _differences(before: object, now: object, key: str = ""):
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key} ({before!r} → {now!r})"


def keeps_optimizer(state: dict, config: RunConfig) -> bool:
    """Whether the optimizers' state in a checkpoint (`state.json`) fits the layout that the run now has.

    Megatron-Core gives experts an optimizer of their own where their layout differs from the rest's, and 0.19 cannot
    reshard between having one and not, nor among layouts that have one. Else the run goes on with the weights alone.
    """
    before, now = ParallelSection.model_validate(state["parallel"]), config.parallel
    if "num_experts" not in state["hf_config"]:
        return True
    apart = [layout.ep > 1 or layout.etp != layout.tp for layout in (before, now)]
    return apart == [False, False] or (apart == [True, True] and (before.ep, before.etp) == (now.ep, now.etp))
