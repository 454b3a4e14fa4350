"""Trajectories that an earlier run recorded, as input of another one."""
from __future__ import annotations

from pathlib import Path

from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder
from sao_megatron.trajectory.store import Store


def find_store(path: Path, needed: int, dropped_too: bool = False, routing: bool = False) -> Path:
    """The store behind what a person gave as --trajectories: a run's folder or the file itself.

    Raises UserError unless it holds `needed` trajectories with an outcome (`dropped_too`: even if dropped),
    recorded with their routing where `routing` is wanted.
    """
    found = RunFolder(path).store_path if path.is_dir() else path
    if not found.is_file():
        raise UserError(f"--trajectories: {found} does not exist: give the folder of a run (such as runs/first) or its "
                        f"trajectories.sqlite")
    with Store(found) as store:
        counts, first = store.counts(), store.read(store.recorded()[:1])
    count = sum(counts.values()) - counts["error"] - (0 if dropped_too else counts["dropped"])
    if count < needed:
        raise UserError(f"--trajectories: {found} holds {count} finished trajectories, {needed} are needed "
                        f"(batch.trajectories of them for each step): record more, or make the batch smaller")
    if routing and first[0].routing is None:
        raise UserError(f"rollout.routing_replay=true: {found} was recorded without routing: set it to false, or "
                        f"record trajectories with it")
    return found
