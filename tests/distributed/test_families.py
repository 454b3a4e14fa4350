"""Every model family: HF folder -> Megatron under several layouts -> HF's log-probs and gradients, and HF again."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from family_models import MODELS, WITH_EXPERTS

ALL = list(MODELS)
JOBS = {1: [("tp1", {}, ALL)],
        2: [("tp2", dict(tp=2), ALL), ("pp2", dict(pp=2), ALL),
            ("pp2·vpp2", dict(pp=2, vpp=2), [name for name in ALL if name != "glm5_2"]),  # shares an indexer
            ("ep2", dict(ep=2), WITH_EXPERTS), ("tp2·ep2", dict(tp=2, ep=2), WITH_EXPERTS),
            ("cp2", dict(cp=2), ["glm4_moe", "deepseek_v3"])]}
CASES = [f"{layout} {name}" for jobs in JOBS.values() for layout, _, names in jobs for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_worlds):
    folder = tmp_path_factory.mktemp("families")
    here = Path(__file__).parent
    halves = [subprocess.Popen(
        [sys.executable, str(here / "family_models.py"), str(folder), *names], text=True,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parents[1])}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE) for names in (ALL[::2], ALL[1::2])]
    for half in halves:
        _, error = half.communicate(timeout=420)
        assert half.returncode == 0, error[-4000:]
    return run_worlds("family_worker.py", folder, JOBS)


@pytest.mark.parametrize("case", CASES)
def test_logprobs_equal_hf(results, case):
    """If this fails, a family computes another function than its checkpoint was trained for."""
    assert results[case]["trajectories"] == 6
    assert results[case]["logprob"] < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_hf(results, case):
    """If this fails, some token's distribution is another one, although the sampled tokens may not show it."""
    assert 0 <= results[case]["logits"] < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_hf(results, case):
    """If this fails, a family is served rightly and trained wrongly."""
    assert results[case]["gradient"] < 2e-5, results[case]["worst"]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("tp1")])
def test_training_equals_one_process(results, case):
    """If this fails, a family's policy or critic is updated otherwise in one layout than in another."""
    one = results[f"tp1 {case.split()[1]}"]["steps"]
    for mine, theirs in zip(one, results[case]["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key


@pytest.mark.parametrize("case", CASES)
def test_export_is_the_checkpoint(results, case):
    """If this fails, a weight was lost, renamed or changed on its way through Megatron."""
    assert results[case]["kept"]


@pytest.mark.parametrize("name", ALL)
def test_the_names_of_transformer_engine_hold_the_checkpoint_too(results, name):
    """If this fails, a GPU's model, whose norms and experts have other names, cannot be loaded or exported."""
    assert results[f"tp1 {name}"]["kept_fused"]


@pytest.mark.parametrize("case", CASES)
def test_critic_freezes_its_attention_only(results, case):
    """If this fails, a family has no critic, or one that trains other parts than the paper's."""
    assert results[case]["critic"] == dict(attention=[], others=True)


@pytest.mark.parametrize("case", CASES)
def test_the_memory_estimate_counts_the_parameters(results, case):
    """If this fails, `submit` lets a job queue that runs out of memory, or refuses one that fits."""
    counts = results[case]["counts"]
    assert len(counts) == (2 if case.startswith("tp1") else 4)
    for rank, count in counts.items():
        assert count["reckoned"] == count["found"], rank


@pytest.mark.parametrize("name", ALL)
def test_the_memory_estimate_of_activations(results, name):
    """If this fails, the estimate leaves out something large, or a layer keeps much that it did not keep before.

    The layers of a CPU fuse less than those that are reckoned, and the plain sparse attention keeps all scores.
    """
    assert 1.0 < results[f"tp1 {name}"]["activations"] < (5.0 if name.startswith("glm5") else 2.5)


@pytest.mark.parametrize("name", ALL)
def test_a_fused_input_norm_keeps_training(results, name):
    """If this fails, a GPU's critic trains other parameters than a CPU's, where norms are modules of their own."""
    fused = [] if "kv_lora_rank" in MODELS[name][1] else ["linear_qkv.layer_norm_weight"]
    assert results[f"tp1 {name}"]["frozen_fused"] == dict(attention=fused, others=True)


@pytest.mark.parametrize("name", ALL)
def test_correction_biases_stay_float32(results, name):
    """If this fails, a bfloat16 run rounds the biases that choose the experts, and routes unlike the engines."""
    biases = ["torch.float32"] if "first_k_dense_replace" in MODELS[name][1] else []
    assert results[f"tp1 {name}"]["dtypes"] == ["torch.bfloat16", *biases]
