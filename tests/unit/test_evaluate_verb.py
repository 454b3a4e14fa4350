"""What `sao-megatron evaluate` makes of its words, up to the start of a run."""
from __future__ import annotations

import json

import pytest

from sao_megatron import cli, launcher


# If this fails, the verb cannot be called as its help says, or evaluates something else than was asked for.
def test_words_become_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}))
    started = []
    monkeypatch.setattr(launcher, "_new_run", started.append)
    assert cli.main(["evaluate", str(tmp_path), "guess_number", "tasks/mine.py:Mine", "evaluation.episodes=64",
                     "evaluation.sets.Mine.task.options.level=3", "evaluation.samples=4", "engine.count=2"]) == 0
    [config] = started
    assert (config.mode, config.model.path, config.model.dtype) == ("rollout", tmp_path, "float32")
    assert config.evaluation.only and config.evaluation.episodes == 0 and config.evaluation.samples == 4
    sets = config.evaluation.sets
    assert {name: (one.task.name, one.task.options, one.episodes) for name, one in sets.items()} == {
        "guess_number": ("guess_number", {}, 64), "Mine": ("tasks/mine.py:Mine", {"level": 3}, 64)}
    assert config.task == sets["guess_number"].task and config.engine.count == 2


# If one fails, a mistake in the words ends in a traceback.
@pytest.mark.parametrize(("words", "sentence"), [
    (["evaluation.samples=2"], "evaluate needs a task"),
    (["guess_number", "evaluation.smples=2"], "evaluation.smples: unknown key"),
])
def test_faults_are_refused(tmp_path, capsys, words, sentence):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["evaluate", str(tmp_path), *words]) == 2
    assert sentence in capsys.readouterr().err
