"""Checkpoints from HF's format to the learner's and back, and the comparison of two, on machines without a GPU.

Any number of processes share a conversion (RANK and WORLD_SIZE, as torchrun sets them): process r takes the parts r,
r + n, … and they meet only in the target's `.partial` folder, where each finished part has a mark. So a conversion that
was stopped goes on where it was. The first process completes the folder.
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from sao_megatron.errors import RunError, UserError
from sao_megatron.learner.megatron_folder import MegatronFolder, WholeModel, join_parts, stored_dtype
from sao_megatron.telemetry.progress import Progress, duration
from sao_megatron.weights import hf, saving
from sao_megatron.weights.families import family_of
from sao_megatron.weights.folder import SafetensorsFolder
from sao_megatron.weights.saving import Entry, partial_of

DTYPES = ("bfloat16", "float32")
JOB, STATE = "conversion.json", "state.json"
WAIT_SECONDS = 3600.0
"""How long the first process waits for the next part of another."""
GIB = 2**30


def hf_to_megatron(source: Path, target: Path, dtype: str | None = None) -> None:
    """Write the HF folder `source` as a checkpoint of the learner with a policy only, at step 0.

    `dtype`: what the weights are stored as (default: the type that config.json names).
    """
    hf_config = hf.read_config(source)
    family_of(hf_config)
    tensors = SafetensorsFolder(source)
    tensors.check()
    dtype = dtype or _dtype_of(hf_config)
    model = WholeModel(hf_config, getattr(torch, dtype))
    job = _Job(target, {"verb": "hf-to-megatron", "source": str(source.resolve()), "dtype": dtype}, model)
    job.run(lambda part: model.write(part, tensors, job.partial))
    if job.is_first:
        saving.copy_beside(source, job.partial, dtype)
        join_parts(job.partial, len(model.parts))
        state = {"format": 1, "step": 0, "updates": 0, "parts": ["policy"], "hf_config": hf_config,
                 "written": time.time()}
        (job.partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
        job.complete()


def megatron_to_hf(source: Path, target: Path, model_dir: Path | None = None) -> None:
    """Write the policy of the learner's checkpoint `source` as an HF folder, in the type that it is stored in.

    config.json and tokenizer come from `model_dir` (default: wherever the checkpoint says that the model lies).
    """
    model_dir = model_dir or _model_dir(source)
    model = WholeModel(hf.read_config(model_dir), stored_dtype(source))
    job = _Job(target, {"verb": "megatron-to-hf", "source": str(source.resolve())}, model)

    def write(part: int) -> None:
        entries = saving.write_files(iter(model.read(part, source).items()), job.partial, f"model-{part:05d}")
        _write_whole(job.partial / f"part-{part:05d}.json", {name: asdict(entry) for name, entry in entries.items()})
    job.run(write)
    if job.is_first:
        entries = {}
        for part in range(len(model.parts)):
            path = job.partial / f"part-{part:05d}.json"
            entries |= {name: Entry(**entry) for name, entry in json.loads(path.read_text()).items()}
        job.complete(lambda: saving.finish(target, entries, model_dir))


class _Job:
    """One conversion, of which this process does a share."""

    def __init__(self, target: Path, what: dict, model: WholeModel):
        self.rank, self.world = _share()
        self.is_first = self.rank == 0
        self.target, self.model, self.partial = target, model, partial_of(target)
        self.mine = [part for part in range(len(model.parts)) if part % self.world == self.rank]
        if self.is_first and target.exists():
            raise UserError(f"{target} exists: give another folder, or remove it")
        if not self.is_first and self._is_mine_done():
            self.mine = []
            return
        self.partial.mkdir(parents=True, exist_ok=True)
        what |= {"parts": len(model.parts)}
        path = self.partial / JOB
        if not path.exists():
            _write_whole(path, what)
        elif (found := json.loads(path.read_text())) != what:
            raise UserError(f"{self.partial} holds the beginning of another conversion ({found}): remove it, or give "
                            f"another target")

    def _is_mine_done(self) -> bool:
        """The first process may have completed the folder already, but only if this one's share was done."""
        try:
            marks = set(os.listdir(self.partial))
        except FileNotFoundError:
            return self.target.exists() or not self.mine
        return all(self._mark(part).name in marks for part in self.mine)

    def run(self, write: Callable[[int], None]) -> None:
        """Do this process's parts that are not done yet; the first process then waits for the others'."""
        todo = self._missing()
        progress = _Bytes(self.model, todo, quiet=not self.is_first)
        for part in self.mine:
            if part in todo:
                write(part)
                self._mark(part).touch()
                progress.show(self._missing())
        last: list[int] = []
        while self.is_first and (missing := self._missing()):
            if missing != last:
                last, deadline = missing, time.monotonic() + WAIT_SECONDS
            if time.monotonic() > deadline:
                raise RunError(f"process {missing[0] % self.world} did not finish part {missing[0]} of {self.target} "
                               f"within {WAIT_SECONDS:.0f} s: start the same command again, it goes on from here")
            progress.show(missing)
            time.sleep(0.2)
        progress.close()

    def complete(self, rename: Callable[[], None] | None = None) -> None:
        """Remove the marks and give the folder its name."""
        for pattern in (JOB, "part-*.done", "part-*.json", "part-*.metadata"):
            for path in self.partial.glob(pattern):
                path.unlink()
        if rename:
            rename()
        else:
            saving.rename(self.partial, self.target)

    def _missing(self) -> list[int]:
        return [part for part in range(len(self.model.parts)) if not self._mark(part).exists()]

    def _mark(self, part: int) -> Path:
        return self.partial / f"part-{part:05d}.done"


class _Bytes:
    """Progress in bytes, with the time that is left."""

    def __init__(self, model: WholeModel, todo: list[int], quiet: bool):
        self.model, self.todo, self.quiet = model, todo, quiet
        self.total = sum(map(model.bytes, range(len(model.parts))))
        self.kept = self.total - sum(map(model.bytes, todo))
        self.began = time.monotonic()
        self.progress = None if quiet else Progress(len(model.parts))
        if self.progress and self.kept:
            self.progress.note(f"going on: {self._of_total(self.kept)} was written before")

    def show(self, missing: list[int]) -> None:
        if self.progress is None:
            return
        done = self.total - sum(map(self.model.bytes, missing))
        seconds = time.monotonic() - self.began
        left = (self.total - done) * seconds / (done - self.kept) if done > self.kept else None
        self.progress.status(f"{self._of_total(done)} written" + ("" if left is None else f", left {duration(left)}"))

    def _of_total(self, count: int) -> str:
        unit, name = (GIB, "GiB") if self.total >= GIB else (GIB / 1024, "MiB")
        return f"{count / unit:.2f} of {self.total / unit:.2f} {name}"

    def close(self) -> None:
        if self.progress:
            self.progress.close()


def verify(first: Path, second: Path | None = None, shown: int = 10) -> int:
    """Compare every tensor of two checkpoints, each of either kind, and print the first differences; or, given one,
    read all of it and compare it with its checksums. Returns how many tensors differ.

    Tensors stored in different types are compared in the second one's.
    """
    a = _open(first)
    if second is None:
        return _verify_one(first, a)
    b = _open(second)
    names = {name: None for name in (*(a if isinstance(a, MegatronFolder) else b).names(), *a.names(), *b.names())}
    hf_config = hf.read_config(_model_dir(first))
    rank, world = _share()
    faults = compared = 0
    mine = list(names)[len(names) * rank // world:len(names) * (rank + 1) // world]
    have_a, have_b = set(a.names()), set(b.names())
    for name in mine:
        if name not in have_a or name not in have_b:
            if not _is_left_out(name, hf_config):
                faults += 1
                _say(faults, shown, f"{name}: only in {first if name in have_a else second}")
            continue
        compared += 1
        if difference := _difference(a, b, name):
            faults += 1
            _say(faults, shown, f"{name}: {difference}")
    print(f"{compared} tensors compared, {faults} differ" + (f" (in the share of process {rank})" if world > 1 else ""))
    return faults


def _verify_one(folder: Path, source) -> int:
    faults = 0
    names = source.names()
    for name in names:
        try:
            source.verify_checksum(name)
            source.get(name, source.shape(name))
        except UserError as error:
            faults += 1
            print(error)
    print(f"{len(names)} tensors of {folder} read, {faults} damaged")
    return faults


def _difference(a, b, name: str) -> str | None:
    if a.shape(name) != b.shape(name):
        return f"shape {a.shape(name)} and {b.shape(name)}"
    x, y = (source.get(name, source.shape(name)) for source in (a, b))
    x = x.to(y.dtype)
    bits = {2: torch.int16, 4: torch.int32}[y.element_size()]
    unequal = x.contiguous().view(bits) != y.contiguous().view(bits)  # NaN equals itself
    count = int(unequal.sum())
    if not count:
        return None
    at = tuple(unequal.nonzero()[0].tolist())
    largest = float((x.double() - y.double()).abs().max())
    return (f"{count} of {x.numel()} elements differ, first at {list(at)}: {float(x[at])!r} and {float(y[at])!r}; "
            f"largest difference {largest:.3g}")


def _say(count: int, shown: int, text: str) -> None:
    if count <= shown:
        print(text)


def _is_left_out(name: str, hf_config: dict) -> bool:
    """Tensors that lie in HF folders but belong to no part of the model that is trained: MTP layers, a tied head."""
    parts = name.split(".")
    beyond = parts[:2] == ["model", "layers"] and int(parts[2]) >= hf_config["num_hidden_layers"]
    return beyond or (name == "lm_head.weight" and hf_config["tie_word_embeddings"])


def _open(folder: Path) -> SafetensorsFolder | MegatronFolder:
    if (folder / ".metadata").is_file():
        return MegatronFolder(folder, hf.read_config(_model_dir(folder)))
    source = SafetensorsFolder(folder)
    source.check()
    return source


def _model_dir(folder: Path) -> Path:
    """Where config.json and tokenizer of a checkpoint lie: in it, or where the run of the learner has its model."""
    if (folder / "config.json").is_file():
        return folder
    if not (folder / STATE).is_file():
        raise UserError(f"{folder} has neither config.json nor {STATE}: it is no HF folder and no checkpoint of the "
                        f"learner, or not a complete one")
    path = json.loads((folder / STATE).read_text()).get("config", {}).get("model", {}).get("path")
    model_dir = Path(path) if path else folder.resolve().parents[1] / "model"
    if not (model_dir / "config.json").is_file():
        raise UserError(f"{folder}: the model that it was trained from is not at {model_dir}: say where its "
                        f"config.json and tokenizer are with --model")
    return model_dir


def _dtype_of(hf_config: dict) -> str:
    named = hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16"
    if named not in DTYPES:
        raise UserError(f"config.json: the learner trains {' or '.join(DTYPES)}, this model is in {named}: choose one "
                        f"with --dtype")
    return named


def _share() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _write_whole(path: Path, content: dict) -> None:
    """Under its name only when it is whole; by several processes at once, if they write the same."""
    unfinished = path.with_suffix(f".tmp{os.getpid()}")
    unfinished.write_text(json.dumps(content))
    unfinished.rename(path)
