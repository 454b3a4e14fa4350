"""Reading an HF folder: however it is stored, only what is asked for, and with a sentence for every damage."""
from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sao_megatron import config as run_config
from sao_megatron.errors import UserError
from sao_megatron.weights.families import FAMILIES
from sao_megatron.weights.folder import SafetensorsFolder
from sao_megatron.weights.hf import prepare_model
from sao_megatron.weights.rules import Geometry, join
from sao_megatron.weights.saving import finish, partial_of, write_files
from sao_megatron.weights.shapes import shape_of
from sao_megatron.weights.slices import fill

GEOMETRY = Geometry(heads=8, kv_heads=4, head_dim=6)
CONFIG = dict(
    architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=2, hidden_size=16, intermediate_size=32,
    num_attention_heads=8, num_key_value_heads=4, head_dim=6, rms_norm_eps=1e-6, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=8, norm_topk_prob=True, vocab_size=32, rope_theta=1e4, tie_word_embeddings=False)


def expert(layer: int, number: int, part: str, mlp: str = "mlp") -> str:
    return f"model.layers.{layer}.{mlp}.experts.{number}.{part}.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two files with an index."""
    torch.manual_seed(0)
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.randn(2, 3), "b": torch.zeros(4)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.ones(3), "ids": torch.arange(3)}, tmp_path / "model-2.safetensors")
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors",
                     "ids": "model-2.safetensors"})
    return tmp_path


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: Path, name: str = "a", shape: tuple = (2, 3)) -> str:
    """The sentence with which reading fails."""
    with pytest.raises(UserError) as error:
        source = SafetensorsFolder(folder)
        source.check()
        source.get(name, shape)
    assert "\n" not in str(error.value)
    return str(error.value)


# If one fails, a damaged checkpoint is loaded, or refused without saying which file and tensor are at fault.
def test_missing_file(folder):
    (folder / "model-2.safetensors").unlink()
    message = refused(folder)
    assert "model-2.safetensors" in message and "tensor c" in message


def test_no_checkpoint_at_all(tmp_path):
    assert "holds no model.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "\xff\xfe", '{"weight_map": []}', "[]", '{"weight_map": {"a": 1}}',
                                  '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}'])
def test_damaged_index(folder, text):
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin1"))
    assert "model.safetensors.index.json" in refused(folder)


@pytest.mark.parametrize("kept", [0, 4, 20, -4])
def test_truncated_file(folder, kept):
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "model-1.safetensors" in refused(folder)


def test_every_bit_of_the_header_counts(folder):
    """A flipped bit in a header is refused, or changes nothing that is read (the order of keys, blanks)."""
    path = folder / "model-1.safetensors"
    whole = path.read_bytes()
    expected = SafetensorsFolder(folder).get("a", (2, 3)).clone()
    silent = 0
    for byte in range(8 + struct.unpack("<Q", whole[:8])[0]):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[byte] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                source = SafetensorsFolder(folder)
                source.check()
                values = source.get("a", (2, 3)), source.get("b", (4,))
            except UserError as error:
                assert "model-1.safetensors" in str(error)
            else:
                silent += 1
                assert values[0].dtype == torch.float32 and torch.equal(values[0], expected) and not values[1].any()
    assert silent < 20


def test_tensor_that_the_index_names_is_not_in_the_file(folder):
    index(folder, {"a": "model-2.safetensors"})
    message = refused(folder)
    assert "model-2.safetensors" in message and "tensor a is missing" in message


def test_tensor_in_two_files(folder):
    """Which of the two an engine serves depends on the order in which it reads."""
    save_file({"a": torch.ones(2, 3), "c": torch.ones(3), "ids": torch.arange(3)}, folder / "model-2.safetensors")
    message = refused(folder)
    assert "model-2.safetensors: tensor a lies in model-1.safetensors too" in message


@pytest.mark.parametrize("file", ["../model-1.safetensors", "/model-1.safetensors", "a/../../model-1.safetensors"])
def test_index_that_leads_out_of_the_folder(folder, file):
    """An engine that is given a copy of the folder serves another file than the one that is trained, or none."""
    index(folder, {"a": file})
    assert f"index.json: tensor a is said to lie in {file}, outside this folder" in refused(folder)


@pytest.mark.parametrize("file", ["m" * 300, "a\0b", ""])
def test_name_that_no_file_can_have(folder, file):
    index(folder, {"a": file})
    assert "the index names it for tensor a" in refused(folder)


def test_files_may_be_links(folder, tmp_path_factory):
    """So are all files of Hugging Face's cache."""
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    (folder / "model-1.safetensors").rename(blob)
    (folder / "model-1.safetensors").symlink_to(blob)
    source = SafetensorsFolder(folder)
    source.check()
    assert source.shape("a") == (2, 3)


@pytest.mark.parametrize(("one", "other", "how"), [
    ({"model.layers.0.mlp.experts.0.down_proj.weight": (4, 2)}, {"model.layers.0.mlp.experts.down_proj": (3, 4, 2)},
     "experts.0.down_proj.weight lies there fused with other experts too"),
    ({"model.layers.0.block_sparse_moe.experts.0.w2.weight": (4, 2)},
     {"model.layers.0.mlp.experts.down_proj": (3, 4, 2)}, "lies there as model.layers.0.block_sparse_moe"),
    ({"model.layers.0.block_sparse_moe.experts.0.w1.weight": (4, 2)},
     {"model.layers.0.mlp.experts.0.gate_proj.weight": (4, 2)}, "lies there as model.layers.0.block_sparse_moe"),
    ({"model.layers.0.block_sparse_moe.gate.weight": (4, 2)}, {"model.layers.0.mlp.gate.weight": (4, 2)},
     "lies there as model.layers.0.block_sparse_moe.gate.weight too")])
def test_tensor_in_two_spellings(tmp_path, one, other, how):
    """Which of the two a reader takes depends on the reader: learner and engine would start from different weights."""
    save_file({name: torch.ones(shape) for name, shape in (one | other).items()}, tmp_path / "model.safetensors")
    assert how in refused(tmp_path)


def test_two_models_in_one_folder(folder):
    """Transformers takes the single file, SGLang the index."""
    save_file({"a": torch.ones(2, 3)}, folder / "model.safetensors")
    assert "holds model.safetensors and an index of other files" in refused(folder)


def test_tensor_that_the_model_needs_is_nowhere(folder):
    message = refused(folder, "d", (1,))
    assert "tensor d is missing" in message and "index.json does not name it" in message


def test_wrong_shape(folder):
    message = refused(folder, "a", (3, 2))
    assert "model-1.safetensors: tensor a has shape (2, 3)" in message and "(3, 2)" in message


def test_integers_are_no_weights(folder):
    message = refused(folder, "ids", (3,))
    assert "tensor ids has type I64" in message and "BF16" in message


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite(tmp_path, dtype, bad):
    """Wherever it is: NaN in an expert that no token meets is trained on, exported and served without a word."""
    for number in range(0, 74, 3):  # more than two vectors of a CPU, and a rest
        whole = torch.linspace(-3, 3, 74).to(dtype)
        whole[number] = bad
        save_file({"a": whole.view(37, 2)}, tmp_path / "model.safetensors")
        assert "model.safetensors: tensor a holds numbers that are not finite" in refused(tmp_path, "a", (37, 2))
        source, row = SafetensorsFolder(tmp_path), number // 2
        with pytest.raises(UserError, match="not finite"):
            source.get("a", (37, 2), (slice(row, row + 1),))
        for rest in (slice(0, row), slice(row + 1, 37)):
            assert source.get("a", (37, 2), (rest,)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_largest_numbers_are_finite(tmp_path, dtype):
    """If this fails, a sum that overflows is taken for a weight that is not finite."""
    whole = torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)
    save_file({"a": whole, "b": -whole}, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    assert torch.equal(source.get("a", (64, 64)), whole) and torch.equal(source.get("b", (64, 64)), -whole)


def test_flipped_bit_in_the_data(tmp_path):
    """Only a checksum can see it; folders that this package writes have one per tensor."""
    (tmp_path / "config.json").write_text("{}")
    target = tmp_path / "out"
    partial_of(target).mkdir()
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    finish(target, write_files(iter(tensors.items()), partial_of(target), "x"), tmp_path)
    SafetensorsFolder(target).verify_checksum("a")
    path = target / "x-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in b, which lies last
    path.write_bytes(data)
    SafetensorsFolder(target).verify_checksum("a")
    with pytest.raises(UserError, match="x-00000.safetensors: the data of tensor b are damaged"):
        SafetensorsFolder(target).verify_checksum("b")


@pytest.mark.parametrize(("quantization", "part"), [
    ({"quant_method": "awq"}, "'awq'"), ("fp8", "cannot be read"), ({"quant_method": "fp8"}, "(block None)"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "(block [128])"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "(block [0, 128])")])
def test_unknown_quantisation(folder, quantization, part):
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert part in refused(folder)


# If it fails, checkpoints of one file, which have no index, cannot be read.
def test_single_file(tmp_path):
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    source.check()
    assert source.names() == ["a"] and source.get("a", (2, 3)).dtype == torch.bfloat16
    assert "model.safetensors does not name it" in refused(tmp_path, "b", (1,))


@pytest.mark.parametrize("parts, mlp", [(("gate_proj", "up_proj", "down_proj"), "mlp"),
                                        (("w1", "w3", "w2"), "block_sparse_moe")])
def test_fused_experts_are_read_by_their_single_names(tmp_path, parts, mlp):
    """If this fails, a checkpoint of transformers 5 loads gate as up, one expert as another, or not at all."""
    gate_up, down = torch.randn(3, 2 * 4, 5), torch.randn(3, 5, 4)
    save_file({"model.layers.1.mlp.experts.gate_up_proj": gate_up, "model.layers.1.mlp.experts.down_proj": down},
              tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    for number in range(3):
        gate, up, narrow = (expert(1, number, part, mlp) for part in parts)
        assert torch.equal(source.get(gate, (4, 5)), gate_up[number, :4])
        assert torch.equal(source.get(up, (4, 5), (slice(1, 3),)), gate_up[number, 5:7])
        assert torch.equal(source.get(narrow, (5, 4), (slice(None), slice(2, 4))), down[number, :, 2:])
    assert len(source.names()) == 9 and source.shape(expert(1, 0, "up_proj")) == (4, 5)
    assert "has 3 experts" in refused(tmp_path, expert(1, 3, "up_proj"), (4, 5))
    assert "gate_up_proj has shape (3, 8, 5)" in refused(tmp_path, expert(1, 0, "up_proj"), (5, 4))


def test_float8_blocks(tmp_path):
    """If this fails, an FP8 checkpoint (DeepSeek-V3's form) is read with the scales of other blocks."""
    torch.manual_seed(0)
    weight = torch.randn(300, 260).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3) + 0.5
    save_file({"w.weight": weight, "w.weight_scale_inv": scale, "lone.weight": weight.clone()},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))
    whole = torch.stack([torch.stack([weight[r, c].float() * scale[r // 128, c // 128] for c in range(260)])
                         for r in range(0, 300, 13)])
    source = SafetensorsFolder(tmp_path)
    assert torch.equal(source.get("w.weight", (300, 260))[::13], whole)
    assert torch.equal(source.get("w.weight", (300, 260), (slice(130, 300),)),
                       source.get("w.weight", (300, 260))[130:])
    assert torch.equal(source.get("w.weight", (300, 260), (slice(None), slice(65, 195))),
                       source.get("w.weight", (300, 260))[:, 65:195])
    assert source.names() == ["lone.weight", "w.weight"]  # without its scales
    assert "lone.weight is float8 without block scales" in refused(tmp_path, "lone.weight", (300, 260))


@pytest.mark.parametrize(("weight", "scale", "part"), [
    (torch.ones(300, 260).to(torch.float8_e4m3fn), torch.ones(2, 3), "w_scale_inv has shape (2, 3)"),
    (torch.ones(300, 260).to(torch.float8_e4m3fn), torch.ones(()), "w_scale_inv has shape ()"),
    (torch.ones(300, 260).to(torch.float8_e4m3fn), torch.ones(3, 3).int(), "w_scale_inv has type I32"),
    (torch.ones(300).to(torch.float8_e4m3fn), torch.ones(3), "expected a matrix"),
    (torch.ones(300, 260).to(torch.float8_e4m3fn), torch.full((3, 3), torch.nan), "w_scale_inv holds numbers that"),
    (torch.full((300, 260), torch.nan).to(torch.float8_e4m3fn), torch.ones(3, 3), "tensor w holds numbers that"),
    (torch.ones(300, 260).bfloat16(), torch.ones(3, 3), "type BF16 and yet block scales")])
def test_scales_that_do_not_fit(tmp_path, weight, scale, part):
    """If one fails, weights are multiplied by the wrong scales, or not by those that they need."""
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}))
    assert part in refused(tmp_path, "w", tuple(weight.shape))


@pytest.mark.parametrize("shape", [(), (8,), (8, 4), (2, 7, 4), (10**9, 0, 4)])
def test_fused_experts_of_another_shape(tmp_path, shape):
    """If this fails, half of an odd number of rows is taken for a projection."""
    save_file({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(shape)}, tmp_path / "model.safetensors")
    assert "rows of gate and as many of up" in refused(tmp_path, expert(0, 0, "up_proj"), (3, 4))


def full_shapes(rule) -> list[tuple[int, ...]]:
    tail = () if rule.hf[0].endswith("bias") else (16,)
    if rule.fuse == "qkv":
        return [(heads * GEOMETRY.head_dim, *tail) for heads in (8, 4, 4)]
    return [(8, *tail)] * len(rule.hf)


RULES = {f"{family.name}: {rule.hf[0]}": rule for family in FAMILIES.values() for rule in family.rules}


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_rank_reads_its_shard_and_no_more(tmp_path, rule, parts):
    """If this fails, ranks hold other rows than `join` gives them, or read the whole model each."""
    shapes = full_shapes(rule)
    tensors = [torch.randn(shape) for shape in shapes]
    save_file({str(i): tensor for i, tensor in enumerate(tensors)}, tmp_path / "model.safetensors")
    names = tuple(map(str, range(len(tensors))))
    for part in range(parts):
        expected = join(rule, tensors, GEOMETRY, parts, part)
        source, target = SafetensorsFolder(tmp_path), torch.full_like(expected, torch.nan)
        fill(target, rule, names, shapes, GEOMETRY, parts, part, source)
        assert torch.equal(target, expected)
        assert source.bytes_read == expected.nbytes


@pytest.mark.slow
def test_memory_is_the_shard_and_one_tensor(tmp_path):
    """If this fails, loading needs more host memory than the rank's own part of the model."""
    tensors, rows, columns, parts = 24, 2048, 1024, 4
    save_file({f"t{i}": torch.ones(rows, columns) for i in range(tensors)}, tmp_path / "model.safetensors")
    code = textwrap.dedent(f"""
        import re, torch
        from pathlib import Path
        from sao_megatron.weights.folder import SafetensorsFolder
        from sao_megatron.weights.rules import Geometry, Rule
        from sao_megatron.weights.slices import fill
        def status(field):
            return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        source, geometry = SafetensorsFolder("{tmp_path}"), Geometry(1, 1, 1)
        rule = Rule(("x",), ("x",), split_dim=0)
        torch.ones(4).sum(); before = status("VmRSS"); Path("/proc/self/clear_refs").write_text("5")
        shards = [torch.empty({rows // parts}, {columns}) for _ in range({tensors})]
        for i, shard in enumerate(shards):
            fill(shard, rule, (f"t{{i}}",), [({rows}, {columns})], geometry, {parts}, 1, source)
        print(status("VmHWM") - before, source.bytes_read)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, read = map(int, done.stdout.split())
    shard, tensor = tensors * rows * columns * 4 // parts, rows * columns * 4
    assert read == shard
    assert peak <= 1.2 * shard + tensor + 16 * 2**20  # a file is closed after this much of it was mapped


@pytest.fixture
def model(tmp_path) -> Path:
    """A model folder of which all that is known before anything starts is in order."""
    folder = tmp_path / "model"
    folder.mkdir()
    store(folder, "model.layers.0.self_attn.rotary_emb.inv_freq")  # reckoned anew, by everybody
    return folder


def store(folder: Path, name: str, dtype: torch.dtype = torch.float32, **config) -> None:
    """All tensors of the model and one of this name, in a file with an index, and a config.json."""
    tensors = {name: torch.ones(shape_of(CONFIG)(name)) for name in FAMILIES["Qwen3MoeForCausalLM"].names(CONFIG)}
    tensors[name] = torch.zeros(32, 16, dtype=dtype)
    save_file(tensors, folder / "model-1.safetensors")
    index(folder, dict.fromkeys(tensors, "model-1.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))


def unnamed(folder: Path, name: str) -> None:
    """The same, with an index that does not name this one."""
    store(folder, name)
    whole = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    index(folder, {other: file for other, file in whole.items() if other != name})


@pytest.mark.parametrize("damage, parts", [
    (lambda folder: (folder / "model-1.safetensors").unlink(), ("model-1.safetensors", "for tensor ")),
    (lambda folder: index(folder, {"x": "model-1.safetensors"}), ("model-1.safetensors", "tensor x is missing")),
    (lambda folder: store(folder, "model.layers.0.self_attn.q_proj.bias"), ("no place for tensor", "q_proj.bias")),
    (lambda folder: store(folder, "model.layers.2.input_layernorm.weight"), ("no place for tensor", "layers.2.")),
    (lambda folder: store(folder, expert(0, 4, "up_proj")), ("no place for tensor", "experts.4.")),
    (lambda folder: store(folder, "lm_head.weight", tie_word_embeddings=True), ("lm_head.weight differs from",)),
    (lambda folder: store(folder, "x"), ("no place for tensor x:",)),
    (lambda folder: store(folder, "x", num_experts=10**9), ("lacks, tensor model.layers.0.mlp.experts.4.", "more")),
    (lambda folder: store(folder, "lm_head.weight", num_hidden_layers=3), ("lacks, tensor model.layers.2.", "more")),
    (lambda folder: store(folder, "model.norm.weight"), (
        "model-1.safetensors: tensor model.norm.weight has shape (32, 16), config.json asks for (16,)",)),
    (lambda folder: store(folder, "lm_head.weight", head_dim=8), (
        "layers.0.self_attn.k_norm.weight has shape (6,), config.json asks for (8,)",)),
    (lambda folder: store(folder, "lm_head.weight", torch.int8), ("tensor lm_head.weight has type I8",)),
    (lambda folder: store(folder, "w_scale_inv"), ("no place for tensor w_scale_inv",)),
    (lambda folder: store(folder, f"model.layers.{'9' * 5000}.x"), ("no place for tensor model.layers.999",)),
    (lambda folder: unnamed(folder, "model.layers.0.self_attn.q_proj.bias"), (
        "model-1.safetensors: tensor model.layers.0.self_attn.q_proj.bias", "the index does not name it")),
    (lambda folder: unnamed(folder, "model.norm.weight"), ("tensor model.norm.weight", "the index does not name it")),
    (lambda folder: (folder / "tokenizer.json").symlink_to("nowhere"), ("tokenizer.json cannot be read",)),
    (lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG)[:-1] + ', "rms_norm_eps": 0.5}'),
     ("config.json is not valid JSON", "'rms_norm_eps' stands there twice, with different values")),
    (lambda folder: (folder / "config.json").write_text("[]"), ("config.json", "expected a JSON object")),
    (lambda folder: (folder / "config.json").write_bytes(b"\xe9"), ("config.json is not valid JSON",)),
    (lambda folder: (folder / ".metadata").write_text(""), ("a checkpoint of the learner", "megatron-to-hf")),
    (lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]}})), ("float8", "tools/convert.py"))])
def test_a_damaged_model_is_refused_before_anything_starts(model, tmp_path, damage, parts):
    """If this fails, engines and learner are started on a checkpoint that none of them can load."""
    config = run_config.parse(dict(name="t", model=dict(path=str(model)), task=dict(name="random"), steps=1))
    assert prepare_model(config, tmp_path) == model
    damage(model)
    with pytest.raises(UserError) as error:
        prepare_model(config, tmp_path)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("harmless", [
    lambda folder: unnamed(folder, "model.layers.0.self_attn.rotary_emb.inv_freq"),
    lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG)[:-1] + ', "rms_norm_eps": 1e-6}'),
    lambda folder: (folder / "sub.json").mkdir()])
def test_what_makes_no_difference_is_not_refused(model, tmp_path, harmless):
    """If one fails, a checkpoint that every reader reads alike is refused for its form."""
    harmless(model)
    config = run_config.parse(dict(name="t", model=dict(path=str(model)), task=dict(name="random"), steps=1))
    assert prepare_model(config, tmp_path) == model
