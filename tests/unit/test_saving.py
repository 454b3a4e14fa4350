"""Writing an HF folder: a crash at any moment leaves either the whole folder or none."""
from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sao_megatron.errors import RunError, UserError
from sao_megatron.weights.folder import SafetensorsFolder
from sao_megatron.weights.hf import check_mtp
from sao_megatron.weights.saving import Entry, finish, partial_of, write_files

BESIDE = {"tokenizer.json", "tiktoken.model", "tokenization_kimi.py", "chat_template.jinja", "merges.txt"}


@pytest.fixture
def model_dir(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float8_e4m3fn", "quantization_config": {}, "x": 1,
                                                    "num_nextn_predict_layers": 1}))
    for name in BESIDE:
        (folder / name).write_text("{}")
    for name in ("model.safetensors.index.json", "state.json", "metadata.json", "pytorch_model.bin", "README.md"):
        (folder / name).write_text("not to be copied")
    return folder


def tensors(count: int = 10):
    for i in range(count):
        yield f"t{i}", torch.full((64, 8), float(i), dtype=torch.bfloat16)  # 1 KiB


def save(folder: Path, model_dir: Path) -> dict[str, Entry]:
    partial_of(folder).mkdir(exist_ok=True)
    entries = write_files(tensors(), partial_of(folder), "model-00000", max_bytes=3000)
    finish(folder, entries, model_dir)
    return entries


def test_folder_is_complete(tmp_path, model_dir):
    """If this fails, Transformers or SGLang cannot load an export, or load it as what it was quantised from."""
    entries = save(tmp_path / "out", model_dir)
    assert [sum(e.file == file for e in entries.values()) for file in sorted({e.file for e in entries.values()})] == [
        2, 2, 2, 2, 2]  # as many as fit into max_bytes
    source = SafetensorsFolder(tmp_path / "out")
    source.check()
    for name, tensor in tensors():
        source.verify_checksum(name)
        assert torch.equal(source.get(name, (64, 8)), tensor)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "torch_dtype": "bfloat16", "x": 1, "num_nextn_predict_layers": 0}
    assert json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["metadata"] == {"total_size": 10240}
    assert {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"} == BESIDE | {
        "config.json", "checksums.json", "model.safetensors.index.json"}
    assert not partial_of(tmp_path / "out").exists()


def test_multi_token_prediction_is_kept_as_it_came(tmp_path, model_dir):
    """If this fails, model.mtp=keep exports a model whose multi-token prediction is lost, or not the checkpoint's."""
    config = json.loads((model_dir / "config.json").read_text()) | {"num_hidden_layers": 2}
    del config["quantization_config"]
    (model_dir / "config.json").write_text(json.dumps(config))
    mtp = {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "model.layers.2.enorm.weight": torch.randn(4)}
    (model_dir / "model.safetensors.index.json").unlink()
    save_file(mtp | {"model.layers.1.mlp.gate.weight": torch.ones(4)}, model_dir / "model.safetensors")
    folder = tmp_path / "out"
    partial_of(folder).mkdir()
    finish(folder, write_files(tensors(), partial_of(folder), "model-00000"), model_dir, mtp=True)
    source = SafetensorsFolder(folder)
    assert source.names() == sorted([*mtp, *dict(tensors())])
    for name, tensor in mtp.items():
        source.verify_checksum(name)
        assert torch.equal(source.get(name, tuple(tensor.shape)), tensor)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(UserError, match=r"has no layers for multi-token prediction \(model.layers.3 …\)"):
        (model_dir / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
        check_mtp(model_dir)


@pytest.mark.parametrize("room", [100, 1500])
def test_a_full_disk_is_named(tmp_path, room):
    """If this fails, an export that does not fit on the disk ends in a traceback of the library's."""
    partial = partial_of(tmp_path / "out")
    partial.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(RunError, match="model-00000.safetensors cannot be written .* is its disk full"):
            write_files(tensors(), partial, "model", max_bytes=3000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(partial.glob("*.safetensors"))


def count_calls(run, kill_at: int | None = None) -> int:
    """Function calls in run(), those into C too; at call `kill_at` the process is killed."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call")
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.slow
def test_killed_while_saving(tmp_path, model_dir):
    """If this fails, kill -9 in the middle of a save leaves a folder that looks complete and is not."""
    folder = tmp_path / "out"
    total = count_calls(lambda: save(folder, model_dir))
    found = []
    for turn, call in enumerate(np.linspace(1, total, 40).astype(int)):
        child = os.fork()
        if child == 0:
            count_calls(lambda: save(folder, model_dir), call)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found.append((os.WIFSIGNALED(status), folder.exists()))
        if folder.exists():
            source = SafetensorsFolder(folder)
            for name, _ in tensors():
                source.verify_checksum(name)
            assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
            if turn % 2:  # half of the saves replace an earlier one
                shutil.rmtree(folder)
    assert (True, True) in found and (True, False) in found
    save(folder, model_dir)  # what crashes left is no obstacle
    SafetensorsFolder(folder).check()
