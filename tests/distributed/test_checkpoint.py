"""A learner that loads a checkpoint goes on as the one that saved it: bit for bit, and closely under another layout."""
from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import hf_logprobs, make_model, make_trajectories

ROOT = Path(__file__).parents[2]
TP2_EP2, DP2_EP2, DP2, TP2, PP2 = dict(tp=2, ep=2), dict(ep=2), {}, dict(tp=2, etp=2), dict(pp=2)
VPP2 = dict(pp=2, vpp=2)
SAO, DPO = dict(preset="sao"), dict(preset="online_dpo")
CASES = {
    "sao": dict(saved=TP2_EP2, algorithm=SAO, dtype="float32", kill=True,
                loaded={"same": TP2_EP2, "other dp": DP2_EP2, "other ep": DP2}),
    "bf16": dict(saved=DP2, algorithm=SAO, dtype="bfloat16", loaded={"same": DP2}),
    "no ep": dict(saved=DP2, algorithm=SAO, dtype="float32", loaded={"same": DP2, "tp": TP2, "pp": PP2, "vpp": VPP2}),
    "vpp": dict(saved=VPP2, algorithm=SAO, dtype="float32", loaded={"same": VPP2, "dp": DP2, "pp": PP2}),
    "dpo": dict(saved=DP2_EP2, algorithm=DPO, dtype="float32", loaded={"same": DP2_EP2}),
    "running mean": dict(saved=DP2, algorithm=dict(preset="running_mean"), dtype="float32",
                         loaded={"same": DP2}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_ranks):
    folder = tmp_path_factory.mktemp("checkpoint")
    model, rng = make_model(folder / "model", layers=4), np.random.default_rng(3)
    trajectories = make_trajectories(16)
    for index, trajectory in enumerate(trajectories):
        trajectory.prompt_id, trajectory.group_id = f"p{index % 5}", f"g{index // 2}"
        with torch.no_grad():
            own = hf_logprobs(model, trajectory).numpy()
        trajectory.rollout_logprobs[trajectory.action_mask] = np.minimum(own - rng.normal(0.0, 0.6, len(own)), -1e-3)
    (folder / "data.pkl").write_bytes(pickle.dumps({"batches": [trajectories[:8], trajectories[8:]]}))
    run_ranks("checkpoint_worker.py", 2, str(folder), json.dumps(CASES))
    return pickle.loads((folder / "results-2.pkl").read_bytes()) | {"folder": folder}


def largest_difference(a: dict, b: dict, part: str) -> float:
    assert a[part].keys() == b[part].keys()
    return max((float(np.abs(a[part][name] - b[part][name]).max()) for name in a[part]), default=0.0)


# If one fails, a run that was interrupted becomes another run: some state of the learner is lost or rounded.
@pytest.mark.parametrize("case", CASES)
def test_same_layout_goes_on_bit_for_bit(results, case):
    straight, resumed = results[case]["straight"], results[case]["same"]
    assert resumed["metrics"] == straight["metrics"]
    for part in ("policy", "critic"):
        assert largest_difference(straight, resumed, part) == 0.0
    assert len(straight["critic"]) > 0 or case in ("dpo", "running mean")


# If one fails, a run cannot move to another number of GPUs, or silently starts with other weights or momentum there.
@pytest.mark.parametrize(("case", "layout"), [("sao", "other dp"), ("no ep", "tp"), ("no ep", "pp"),
                                              ("no ep", "vpp"), ("vpp", "dp"), ("vpp", "pp")])
def test_other_layout_goes_on_closely(results, case, layout):
    straight, resumed = results[case]["straight"], results[case][layout]
    for part in ("policy", "critic"):
        assert largest_difference(straight, resumed, part) < 2e-5
    assert resumed["metrics"][0]["policy/lr"] == straight["metrics"][0]["policy/lr"]


# If this fails, experts that moved to other ranks are not the ones that were saved.
def test_other_expert_layout_keeps_weights_and_schedule(results):
    straight, resumed = results["sao"]["straight"]["metrics"][0], results["sao"]["other ep"]["metrics"][0]
    assert resumed["policy/lr"] == straight["policy/lr"]
    for key in ("critic/loss", "ratio/log_abs_mean", "policy/grad_norm"):  # of the forward pass before any update
        assert resumed[key] == pytest.approx(straight[key], rel=1e-4)


# If this fails, a flipped bit in a checkpoint becomes a weight, and nobody notices.
def test_a_flipped_bit_is_found(results):
    nothing, sentence = results["sao"]["damaged"]
    assert nothing == "" and ".distcp: the data of " in sentence and "are damaged" in sentence


# If this fails, a run goes on in silence with weights that compute something else than they did.
def test_another_config_json_is_refused(results):
    assert "is of another model than model.path now holds (rope_theta is " in results["sao"]["another model"]


# If this fails, a checkpoint that was copied to another place cannot be looked at there, or only its policy is.
def test_verify_reads_all_of_a_checkpoint_anywhere(results, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(results["folder"] / "vpp" / "step-00000002", folder)

    def verify():
        done = subprocess.run([sys.executable, str(ROOT / "tools" / "convert.py"), "verify", str(folder)], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env=os.environ | {"PYTHONPATH": str(ROOT)})
        return done.returncode, done.stdout
    code, said = verify()
    assert code == 0 and " 0 damaged" in said, said
    items = pickle.loads((folder / ".metadata").read_bytes()).storage_data.items()
    info = max((info for index, info in items if index.fqn.startswith("critic_optimizer.")), key=lambda i: i.length)
    data = bytearray((folder / info.relative_path).read_bytes())
    data[info.offset + info.length // 2] ^= 8
    (folder / info.relative_path).write_bytes(data)
    code, said = verify()
    assert code == 2 and "the data of critic_optimizer." in said and "are damaged" in said, said


# If this fails, a writer that was killed, or whose disk was full, leaves a checkpoint that looks complete, or files
# that keep the disk full, or ends the run.
def test_failed_writers_leave_the_checkpoint_before(results):
    assert results["sao"]["complete"] == [2]
    assert results["sao"]["left"] == ["step-00000002"]
