"""Runs tools/convert.py's commands in one process (imports cost more than they do) and writes what each answered.

    python convert_worker.py FOLDER                        # the commands in `main`
    torchrun … convert_worker.py megatron-to-hf FROM TO    # the tool itself, but for the size of the parts
"""
from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pickle
import runpy
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import convert  # noqa: E402

from sao_megatron.learner import megatron_folder  # noqa: E402


def answer(*arguments: str, rank: int = 0, world: int = 1) -> dict:
    """Exit code and output of one command, as process `rank` of `world`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = convert.main(list(arguments))
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def interrupted(source: Path, target: Path, again: bool = True) -> dict:
    """kill -9 when the fourth part is written and not yet marked, then (unless not `again`) the same command again;
    which of the first three it did not write again."""
    child = os.fork()
    if child == 0:
        write = megatron_folder.WholeModel.write

        def write_and_die(model, part, *arguments):
            write(model, part, *arguments)
            if part == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        megatron_folder.WholeModel.write = write_and_die
        convert.main(["hf-to-megatron", str(source), str(target)])
    os.waitpid(child, 0)
    partial = target.with_name(target.name + ".partial")
    before = {mark.with_suffix(".distcp").name: mark.with_suffix(".distcp").stat().st_mtime_ns
              for mark in partial.glob("part-*.done")}
    left = target.exists()
    if not again:
        return {"existed": left}
    result = answer("hf-to-megatron", str(source), str(target))
    return result | {"existed": left, "kept": [(target / name).stat().st_mtime_ns == when
                                               for name, when in before.items()]}


def flip_bit_of_data(path: Path) -> None:
    """In the middle of the largest item of a .distcp file: the rest is headers and padding."""
    storage = pickle.loads((path.parent / ".metadata").read_bytes()).storage_data.values()
    item = max((info for info in storage if info.relative_path == path.name), key=lambda info: info.length)
    data = bytearray(path.read_bytes())
    data[item.offset + item.length // 2] ^= 8
    path.write_bytes(data)


def flip_bit_of_metadata(folder: Path) -> None:
    data = bytearray((folder / ".metadata").read_bytes())
    data[len(data) // 2] ^= 2
    (folder / ".metadata").write_bytes(data)


def made_elsewhere(checkpoint: Path, folder: Path) -> None:
    """A copy whose state.json says nothing of the model and of .metadata."""
    shutil.copytree(checkpoint, folder)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({key: state[key] for key in ("format", "step")}))


def misplace(folder: Path, key: str, lost: int = 0) -> None:
    """In .metadata, say of a tensor's first piece that it belongs where the second does; leave out `lost` pieces."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    first, second, *rest = metadata.state_dict_metadata[key].chunks
    metadata.state_dict_metadata[key].chunks = [replace(first, offsets=second.offsets), second, *rest][lost:]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def main(folder: Path) -> None:
    found = {}

    def run(name: str, *arguments, **share) -> None:
        paths = [i and a[0] != "-" and arguments[i - 1] not in ("--dtype", "--mtp") for i, a in enumerate(arguments)]
        found[name] = answer(*[str(folder / a) if is_path else a for a, is_path in zip(arguments, paths, strict=True)],
                             **share)
    run("there", "hf-to-megatron", "single", "meg")
    (folder / "hf.partial").mkdir()
    (folder / "hf.partial" / "part-00000.json.tmp77").write_text("{")  # a process was killed while it wrote this
    run("back", "megatron-to-hf", "meg", "hf")
    run("equal", "verify", "single", "meg")
    run("mtp", "megatron-to-hf", "meg", "hf-mtp", "--mtp", "keep", "--model", "mtp")
    run("mtp equal", "verify", "mtp", "hf-mtp")
    run("no mtp", "megatron-to-hf", "meg", "x", "--mtp", "keep")
    run("whole", "verify", "hf")
    run("nothing to compare", "verify", "single")
    run("fused", "hf-to-megatron", "fused", "meg-fused")
    run("fused equal", "verify", "meg", "meg-fused")
    run("float8", "hf-to-megatron", "float8", "meg-float8")
    run("float8 back", "megatron-to-hf", "meg-float8", "hf-float8")
    run("rounded", "hf-to-megatron", "single", "meg-bf16", "--dtype", "bfloat16")
    run("rounded equal", "verify", "single", "meg-bf16")
    run("second of two", "hf-to-megatron", "single", "meg-two", rank=1, world=2)
    found["before the first"] = (folder / "meg-two").exists()
    with (folder / "meg-two.partial" / "process-00000.lock").open("w") as lock:  # as the first process would hold it
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("twice", "hf-to-megatron", "single", "meg-two", world=2)
    run("first of two", "hf-to-megatron", "single", "meg-two", world=2)
    run("late second", "hf-to-megatron", "single", "meg-two", rank=1, world=2)
    run("two equal", "verify", "meg", "meg-two")
    run("mixtral equal", "verify", "mixtral", "mixtral-fused")
    run("altered", "verify", "single", "altered")
    run("altered megatron", "verify", "altered", "meg")
    run("exists", "hf-to-megatron", "single", "meg")
    run("nothing", "hf-to-megatron", "nowhere", "x")
    run("no checkpoint", "megatron-to-hf", "empty", "x")
    run("no tensors", "megatron-to-hf", "single", "x")
    found["killed"] = interrupted(folder / "single", folder / "meg-killed")
    run("killed equal", "verify", "single", "meg-killed")
    (folder / "tied").mkdir()
    config = json.loads((folder / "single" / "config.json").read_text())
    (folder / "tied" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    made_elsewhere(folder / "meg", folder / "elsewhere")
    run("elsewhere", "verify", "single", "elsewhere")
    run("another head", "megatron-to-hf", "elsewhere", "x3", "--model", "tied")
    run("another model", "megatron-to-hf", "meg", "x3", "--model", "other-maths")
    run("maths", "verify", "meg", "other-maths")
    run("a layer more", "verify", "single", "longer")
    run("a layer less", "verify", "longer", "single")
    run("left out", "verify", "glm-mtp", "glm")
    run("left out of the second", "verify", "glm", "glm-mtp")
    run("text for a number", "verify", "single", "text-layers")
    run("no number", "verify", "no-layers", "longer")
    shutil.copytree(folder / "meg", folder / "no-state")
    (folder / "no-state" / "config.json").unlink()
    (folder / "no-state" / "state.json").write_text("{")
    run("no state", "megatron-to-hf", "no-state", "x4")
    shutil.copytree(folder / "single", folder / "changing")
    found["begun"] = interrupted(folder / "changing", folder / "x5", again=False)
    (folder / "changing" / "model.safetensors").touch()
    run("changed", "hf-to-megatron", "changing", "x5")
    (folder / "file").write_text("")
    run("no room", "megatron-to-hf", "meg", "file/x")
    for file in (folder / "meg-killed").glob("part-00003.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    run("damaged", "verify", "single", "meg-killed")
    shutil.copytree(folder / "meg", folder / "meg-flipped")
    flip_bit_of_data(next((folder / "meg-flipped").glob("part-00003.distcp")))
    run("flipped back", "megatron-to-hf", "meg-flipped", "x6")
    run("flipped alone", "verify", "meg-flipped")
    shutil.copytree(folder / "meg", folder / "meg-placed")
    flip_bit_of_metadata(folder / "meg-placed")
    run("misplaced back", "megatron-to-hf", "meg-placed", "x7")
    run("misplaced", "verify", "single", "meg-placed")
    run("misplaced alone", "verify", "meg-placed")
    misplace(folder / "elsewhere", "policy.decoder.layers.self_attention.linear_qkv.weight")
    run("misplaced elsewhere", "verify", "single", "elsewhere")
    misplace(folder / "elsewhere", "policy.decoder.layers.self_attention.linear_proj.weight", lost=1)
    run("lost elsewhere", "verify", "single", "elsewhere")
    shutil.copytree(folder / "hf", folder / "hf-flipped")
    flip = next((folder / "hf-flipped").glob("model-00002*"))
    data = bytearray(flip.read_bytes())
    data[-1] ^= 16
    flip.write_bytes(data)
    run("flipped", "verify", "hf-flipped")
    run("flipped there", "hf-to-megatron", "hf-flipped", "x2")
    (folder / "answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    megatron_folder.PART_BYTES = 60_000
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        runpy.run_path(convert.__file__, run_name="__main__")
