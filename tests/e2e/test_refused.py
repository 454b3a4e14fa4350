"""Bad input to `train`: one sentence, exit code 2, before any process starts and with no run folder left behind."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from real_run import ENVIRONMENT, RECIPE, ROOT, START_SECONDS

from sao_megatron import cli

REFUSED = {
    "unknown key": ("batch.trajectoris=16", "batch.trajectoris: unknown key; known keys here: trajectories"),
    "unknown section": ("modle.dtype=float32", "modle: unknown key"),
    "wrong type": ("steps=many", "steps: Input should be a valid integer"),
    "wrong choice": ("model.dtype=float16", "model.dtype: Input should be 'float32' or 'bfloat16' (got 'float16')"),
    "not an override": ("steps:3", "override 'steps:3' is not of the form key.subkey=value"),
    "heads": ("parallel={ranks: 3, tp: 3}", "parallel.tp=3 does not divide the model's attention heads "
              "(num_attention_heads=8)"),
    "experts": ("parallel={ranks: 3, ep: 3}", "parallel.ep=3 does not divide the model's experts (num_experts=8)"),
    "layers": ("parallel={ranks: 3, pp: 3}", "parallel.pp=3 does not divide the model's layers (num_hidden_layers=2)"),
    "chunks": ("parallel={ranks: 2, pp: 2, vpp: 2}", "parallel.pp=2 times parallel.vpp=2 does not divide the model's "
               "layers (num_hidden_layers=2)"),
    "ranks and tp": ("parallel.ranks=3", "parallel: ranks=3 is not a multiple of tp*pp*cp = 2*1*1"),
    "ranks and ep": ("parallel={ranks: 2, tp: 1, ep: 4}", "parallel: ranks=2 is not a multiple of ep*etp*pp = 4*1*1"),
    "no model folder": ("model={path: nowhere}", "model.path: folder nowhere does not exist"),
    "unknown task": ("task.name=guess_letter", "unknown task 'guess_letter': known are guess_number, levers"),
    "unknown option": ("task.options={trns: 4}", "task guess_number has no option 'trns': its options are low, high"),
    "no critic": ("critic.path=nowhere", "critic.path: nowhere has no value_head.json"),
    "unknown preset": ("algorithm.preset=soa", "unknown preset 'soa'; known: sao"),
    "architecture": ("model.fresh.architectures=[FooForCausalLM]",
                     "config.json: architecture 'FooForCausalLM' is not supported; known: Qwen2ForCausalLM"),
    "multi-token prediction": ("model.mtp=keep", "model.mtp=keep: model.fresh has no layers"),
    "config.json field": ("model.fresh.sliding_windows=128", "sliding_windows"),
    "config.json value": ("model.fresh.attention_bias=true", "attention_bias"),
    "foreign address": ("engine.host=192.0.2.1", "host=192.0.2.1: 0 ports can be used, 1 are needed"),
    "idle controllers": ("rollout={concurrency: 2, controllers: 3}",
                         "rollout: concurrency=2 leaves some of controllers=3 without an episode"),
    "redundancy without groups": ("rollout.redundancy=2", "rollout.redundancy=2 is for groups, preset sao has single"),
    "unknown key of a set": ("evaluation.sets={hard: {task: {name: levers}, episodes: 3, smples: 2}}",
                             "evaluation.sets.hard.smples: unknown key; known keys here: task, episodes, samples"),
    "name of a set": ("evaluation.sets={guess_number: {task: {name: levers}, episodes: 3}}",
                      "evaluation.sets.guess_number has the name of the run's own task"),
    "unknown task of a set": ("evaluation.sets={hard: {task: {name: nothing}, episodes: 3}}",
                              "unknown task 'nothing': known are"),
    "small vocabulary": ("model.fresh.vocab_size=16", "the model's vocabulary has 16"),
}


def check_sentence(error: str, expected: str, runs_dir: Path) -> None:
    assert error.startswith("sao-megatron: ") and error.endswith("\n") and error.count("\n") == 1, error
    assert expected in error
    assert list(runs_dir.iterdir()) == []


# If one fails, a mistake costs a start-up before it is found, is answered by a traceback, or blocks the run's name.
@pytest.mark.parametrize("fault", REFUSED)
def test_refused(fault, tmp_path, capsys):
    before = set(psutil.Process().children())  # other tests' engine, for one
    override, expected = REFUSED[fault]
    assert cli.main(["train", str(RECIPE), f"runs_dir={tmp_path}", "name=refused", override]) == 2
    check_sentence(capsys.readouterr().err, expected, tmp_path)
    assert set(psutil.Process().children()) <= before, "refused after something was started"


# If one fails, a shell script that calls the command cannot tell bad input from a failed run.
@pytest.mark.parametrize("fault", ["unknown key", "experts"])
def test_exit_code_of_the_command(fault, tmp_path):
    override, expected = REFUSED[fault]
    done = subprocess.run([sys.executable, "-m", "sao_megatron.cli", "train", str(RECIPE), f"runs_dir={tmp_path}",
                           "name=refused", override], cwd=ROOT, env=ENVIRONMENT, text=True, timeout=START_SECONDS,
                          capture_output=True)
    assert done.returncode == 2
    check_sentence(done.stderr, expected, tmp_path)


# If this fails, a model folder without weights or with a broken config.json is found by a process that has started.
@pytest.mark.parametrize(("files", "expected"), [
    ({}, "has no config.json"),
    ({"config.json": "{"}, "is not valid JSON"),
    ({"config.json": "{}"}, "architecture '(none)' is not supported"),
])
def test_broken_model_folder(files, expected, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "runs").mkdir()
    for name, text in files.items():
        (tmp_path / "model" / name).write_text(text)
    model = f"model={{path: {tmp_path / 'model'}}}"
    assert cli.main(["train", str(RECIPE), f"runs_dir={tmp_path / 'runs'}", "name=refused", model]) == 2
    check_sentence(capsys.readouterr().err, expected, tmp_path / "runs")
