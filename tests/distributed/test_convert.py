"""A model through every format: HF folders in all forms, every layout of ranks, the learner's checkpoints, and back."""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_models import MODELS
from reference import make_model
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("convert_worker.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
LAYOUTS = ("tp2", "ep2", "tp2ep2", "tp2etp2", "pp2", "pp2vpp2")  # of folder_worker.py
BLOCK = 32
LAYERS = 4
MTP = {f"model.layers.{LAYERS}.eh_proj.weight": torch.randn(64, 128),
       f"model.layers.{LAYERS}.enorm.weight": torch.randn(64)}
"""Multi-token prediction: a layer after those that are trained."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a folder's files, read by the safetensors library alone."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts as transformers 5 holds them."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        def stack(part, block=f"model.layers.{layer}.mlp.experts"):
            return torch.stack([tensors[f"{block}.{e}.{part}_proj.weight"] for e in range(8)])
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], 1)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = stack("down")
    return fused


def renamed(name: str, names: dict[str, str]) -> str:
    for new, old in names.items():
        name = name.replace(new, old)
    return name


def quantise(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(float8 tensors with a scale per block, what they stand for in bfloat16)."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if ".experts." not in name and "self_attn" not in name or "norm" in name:
            stored[name] = meant[name] = tensor.bfloat16()
            continue
        scale = torch.rand(-(-tensor.shape[0] // BLOCK), -(-tensor.shape[1] // BLOCK)) + 0.01
        spread = scale.repeat_interleave(BLOCK, 0)[:tensor.shape[0]].repeat_interleave(BLOCK, 1)[:, :tensor.shape[1]]
        stored[name] = (tensor / spread).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        meant[name] = (stored[name].float() * spread).bfloat16()
    return stored, meant


def write(folder: Path, model: Path, tensors: dict[str, torch.Tensor], files: int = 3, **config) -> None:
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {name: f"model-{i * files // len(names)}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | config))


def make_glm_config(folder: Path) -> None:
    """config.json of a GLM-4.5 with a layer for multi-token prediction."""
    from transformers import Glm4MoeConfig
    Glm4MoeConfig(**MODELS["glm4_moe"][1], num_nextn_predict_layers=1,
                  architectures=["Glm4MoeForCausalLM"]).save_pretrained(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of everything, the original tensors, and what float8 ones stand for."""
    folder = tmp_path_factory.mktemp("convert")
    make_model(folder / "single", layers=LAYERS)
    make_model(folder / "large", hidden_size=512, moe_intermediate_size=512, vocab_size=4096, num_experts=24)
    original = tensors_of(folder / "single")
    write(folder / "fused", folder / "single", fuse(original))
    stored, meant = quantise(original)
    write(folder / "float8", folder / "single", stored, dtype="bfloat16", quantization_config={
        "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    shutil.copytree(folder / "single", folder / "altered")
    altered = dict(original)
    altered["model.layers.1.mlp.gate.weight"] = original["model.layers.1.mlp.gate.weight"].clone()
    altered["model.layers.1.mlp.gate.weight"][3, 17] += 0.5
    altered["model.extra"] = torch.ones(1)
    save_file(altered, folder / "altered" / "model.safetensors")
    (folder / "empty").mkdir()
    write(folder / "mtp", folder / "single", original | MTP)
    write(folder / "other-maths", folder / "single", original, rms_norm_eps=1e-5, num_experts_per_tok=4,
          use_cache=False)
    more = {name.replace(".3.", ".4.", 1): t.clone() for name, t in original.items() if ".layers.3." in name}
    write(folder / "longer", folder / "single", original | more, num_hidden_layers=5)
    write(folder / "text-layers", folder / "single", original | more, num_hidden_layers="4")
    write(folder / "no-layers", folder / "single", original, num_hidden_layers=None)
    make_glm_config(folder / "glm-config")
    write(folder / "glm-mtp", folder / "glm-config", {"model.norm.weight": torch.ones(64)} | MTP)
    write(folder / "glm", folder / "glm-config", {"model.norm.weight": torch.ones(64)}, num_nextn_predict_layers=0)
    write(folder / "mixtral-fused", folder / "single", fuse(original))
    old = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    write(folder / "mixtral", folder / "single", {renamed(name, old): t for name, t in original.items()})
    return folder, original, meant


@pytest.fixture(scope="module")
def answers(made):
    """What tools/convert.py answered to the commands of convert_worker.py."""
    done = subprocess.run([sys.executable, str(WORKER), str(made[0])],
                          env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads((made[0] / "answers.json").read_text())


@pytest.fixture(scope="module")
def layouts(made, answers, run_ranks):
    """Bytes (read, own) of both ranks by layout."""
    run_ranks("folder_worker.py", 2, str(made[0]))
    return json.loads((made[0] / "read.json").read_text())


def test_there_and_back_is_bitwise_the_same(made, answers):
    """If this fails, converting a checkpoint changes its weights."""
    folder, original, _ = made
    assert answers["there"]["code"] == answers["back"]["code"] == 0, answers["back"]["err"]
    assert same(tensors_of(folder / "hf"), original)
    assert json.loads((folder / "hf" / "config.json").read_text()) == json.loads(
        (folder / "single" / "config.json").read_text())


def test_progress_has_an_eta(answers):
    """If this fails, a conversion of hours says nothing of how long it takes."""
    assert re.search(r"[\d.]+ of [\d.]+ MiB written, left \d+s", answers["there"]["out"])


@pytest.mark.parametrize("name", ["equal", "whole", "fused equal", "rounded equal", "two equal", "killed equal",
                                  "mixtral equal", "mtp equal", "elsewhere", "left out", "left out of the second"])
def test_verify_finds_no_difference(answers, name):
    """If one fails: verify cries wolf (Mixtral's two spellings), or that way of converting (fused experts, rounding,
    several processes, a conversion that was killed, multi-token prediction kept) gives other weights; or a checkpoint
    whose state.json has no checksum, or a folder with layers that are not trained, cannot be compared."""
    assert answers[name]["code"] == 0, answers[name]
    assert " 0 differ" in answers[name]["out"] or " 0 damaged" in answers[name]["out"]


@pytest.mark.parametrize("name", ["hf-mtp", "saved-mtp"])
def test_multi_token_prediction_is_kept_on_request(made, layouts, name):
    """If one fails, an export (of the converter, of a run) with `mtp=keep` has lost those layers, or changed them."""
    assert same(tensors_of(made[0] / name), made[1] | MTP)


def test_float8_is_multiplied_out(made, answers):
    """If this fails, a DeepSeek-style FP8 checkpoint becomes another model."""
    folder, _, meant = made
    assert answers["float8 back"]["code"] == 0, answers["float8"]["err"] + answers["float8 back"]["err"]
    assert same(tensors_of(folder / "hf-float8"), meant)
    config = json.loads((folder / "hf-float8" / "config.json").read_text())
    assert "quantization_config" not in config and "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


def test_processes_share_a_conversion(answers):
    """If this fails, the folder appears before every process is done, one of them does everything, or a process that
    starts when all is done (its share was, before a restart) fails."""
    assert [answers[name]["code"] for name in ("second of two", "first of two", "late second")] == [0, 0, 0]
    assert not answers["before the first"] and "written before" in answers["first of two"]["out"]


def test_a_killed_conversion_goes_on(answers):
    """If this fails, kill −9 leaves a folder that looks complete, or hours of work are done again."""
    killed = answers["killed"]
    assert not killed["existed"] and killed["code"] == 0 and killed["kept"] == [True] * 3
    assert "going on" in killed["out"]


@pytest.mark.parametrize("name", ["altered", "altered megatron"])
def test_verify_says_what_differs(answers, name):
    """If this fails, a wrong weight goes unnoticed, or nobody can find it."""
    out = answers[name]["out"]
    assert answers[name]["code"] == 1
    assert "model.layers.1.mlp.gate.weight: 1 of 512 elements differ, first at [3, 17]" in out
    assert "largest difference 0.5" in out and "model.extra: only in" in out and "2 differ" in out


def test_verify_says_where_config_json_differs(answers):
    """If this fails, the same tensors under another config.json, which are another model, are called equal; or fields
    that change nothing are called differences."""
    assert answers["maths"]["code"] == 1
    assert answers["maths"]["out"].splitlines() == [
        "config.json: num_experts_per_tok is 2 and 4", "config.json: rms_norm_eps is 1e-06 and 1e-05",
        "135 tensors compared, 0 differ, and config.json does"]


@pytest.mark.parametrize("name", ["a layer more", "a layer less"])
def test_verify_misses_no_layer(answers, name):
    """If one fails, a checkpoint that has lost its last layer is called equal to the whole one."""
    out = answers[name]["out"]
    assert answers[name]["code"] == 1 and out.splitlines()[0].startswith("config.json: num_hidden_layers is ")
    assert "model.layers.4." in out and ": only in " in out and ", 33 differ, and config.json does" in out


def test_a_killed_process_leaves_nothing_in_the_folder(made, answers):
    """If this fails, what kill −9 left of an unfinished file lies in the finished folder."""
    assert {path.suffix for path in (made[0] / "hf").iterdir()} == {".safetensors", ".json"}
    assert {path.suffix for path in (made[0] / "meg-killed").iterdir()} == {".distcp", ".json", ""}  # .metadata


@pytest.mark.parametrize("name, code, parts", [
    ("exists", 2, ["meg exists"]), ("nothing", 2, ["nowhere has no config.json"]),
    ("no checkpoint", 2, ["empty has neither config.json nor state.json"]),
    ("no tensors", 2, ["single is no checkpoint of the learner"]),
    ("no mtp", 2, ["meg has no layers for multi-token prediction"]),
    ("another head", 2, ["holds the tensor policy.output_layer.weight, for which the model of config.json has no"]),
    ("twice", 2, ["meg-two: this conversion is already running"]),
    ("another model", 2, ["meg is of another model than", "other-maths/config.json (num_experts_per_tok is 2 and 4, "]),
    ("text for a number", 2, ["num_hidden_layers='4' cannot be", "text-layers/config.json"]),
    ("no number", 2, ["num_hidden_layers=None cannot be", "no-layers/config.json"]),
    ("misplaced back", 2, ["meg-placed: its .metadata is damaged (checksum "]),
    ("misplaced", 2, ["meg-placed: its .metadata is damaged (checksum "]),
    ("misplaced alone", 2, ["meg-placed: its .metadata is damaged (checksum "]),
    ("misplaced elsewhere", 2, ["elsewhere: the checkpoint has no data for a part of model.layers.0.self_attn.q_proj"]),
    ("lost elsewhere", 2, ["elsewhere: the pieces of policy.decoder.layers.self_attention.linear_proj.weight do not"]),
    ("no state", 2, ["no-state has no readable state.json"]),
    ("changed", 2, ["x5.partial holds the beginning of another conversion (", "files was"]),
    ("flipped back", 2, ["part-00003.distcp: the data of policy.", "are damaged"]),
    ("flipped alone", 2, ["part-00003.distcp: the data of policy.", "are damaged"]),
    ("no room", 1, ["file/x.partial: Not a directory"]),
    ("damaged", 2, ["meg-killed/part-00003.distcp: the data of policy.", "damaged"]),
    ("flipped there", 2, ["model-00002-00000.safetensors: the data of tensor", "are damaged"])])
def test_faults_are_one_sentence(answers, name, code, parts):
    """If one fails, somebody with a broken checkpoint gets a traceback, or a converted checkpoint that is wrong."""
    assert answers[name]["code"] == code
    assert answers[name]["err"].startswith("convert: ") and answers[name]["err"].count("\n") == 1
    assert all(part in answers[name]["err"] for part in parts), answers[name]["err"]


def test_a_flipped_bit_is_found(answers):
    """If this fails, checksums are written but mean nothing."""
    assert answers["flipped"]["code"] == 1 and "are damaged (checksum" in answers["flipped"]["out"]
    assert "no checksums" in answers["nothing to compare"]["out"] and "no checksums" not in answers["whole"]["out"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_reads_its_part_and_saves_the_whole(made, layouts, name):
    """If this fails, an export differs from the checkpoint it came from, or every rank reads the whole model."""
    folder, original, _ = made
    assert same(tensors_of(folder / f"saved-{name}"), original)
    assert all(read == own for read, own in layouts[name])


def test_loading_takes_the_memory_of_the_shard_and_one_tensor(layouts):
    """If this fails, a rank of a 744B model needs the host memory of more than its own part of it."""
    for grown, own, largest in layouts["memory"]:
        assert own > 2**26 and 0.8 * own < grown <= 1.2 * own + largest + 2**24  # files are closed after 16 MiB of them


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_a_converted_checkpoint(made, layouts, name):
    """If this fails, the learner starts from other weights than those that were converted."""
    assert same(tensors_of(made[0] / f"converted-{name}"), made[1])


def test_the_rank_that_owns_damaged_weights_refuses_them(layouts):
    """If this fails, a checkpoint with a flipped bit is trained. Of two pipeline stages, the last has the damage."""
    first, last = layouts["damaged"]
    assert first == "" and "model-00001" in last and "are damaged (checksum" in last


def test_a_learners_checkpoint_becomes_hf(made, layouts):
    """If this fails, what was trained on several ranks cannot be taken home, or two processes of torchrun's that share
    a conversion get in each other's way."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(WORKER),
         "megatron-to-hf", str(made[0] / "step-00000007"), str(made[0] / "home")], env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500)
    assert done.returncode == 0 and " MiB written" in done.stdout, done.stdout[-6000:]
    assert len(list((made[0] / "home").glob("*.safetensors"))) > 4  # the parts were small enough to be shared
    assert same(tensors_of(made[0] / "home"), made[1])
