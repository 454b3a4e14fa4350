"""The command line: exit codes, one-sentence errors, help by example. Real processes, no mocks."""
import re
import subprocess
import sys

import pytest
import yaml

from sao_megatron import cli

RECIPE = {"name": "test", "task": {"name": "guess_number"}, "model": {"path": "nowhere"}}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"runs_dir": str(tmp_path / "runs")}))
    return path


def refused(capsys, *argv) -> str:
    """The sentence on stderr of a command line that is refused as bad input."""
    assert cli.main([str(argument) for argument in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sao-megatron: ") and error.count("\n") == 1
    return error


# If this fails, `--help` waits for torch.
def test_help_imports_nothing_heavy():
    code = ("import sys\nfrom sao_megatron import cli\n"
            "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
            "print(*({'torch', 'megatron', 'sglang', 'pydantic', 'aiohttp'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert "train" in done.stdout and "presets" in done.stdout


# If one fails, a verb's help does not show how it is called.
@pytest.mark.parametrize("verb", ["train", "engine", "sandbox", "controller", "learner", "presets", "summary",
                                  "pretrain-value", "inspect", "submit", "status"])
def test_every_verb_has_an_example(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    assert ended.value.code == 0
    example = re.split("examples?:", capsys.readouterr().out)[1]
    assert f"sao-megatron {verb}" in example or f"-m sao_megatron.cli {verb}" in example


# If this fails, the installed command or `python -m` hides its exit code or prints a traceback.
def test_exit_code_of_the_process(tmp_path):
    done = subprocess.run([sys.executable, "-m", "sao_megatron.cli", "train", str(tmp_path / "none.yaml")],
                          capture_output=True, text=True)
    assert done.returncode == 2
    assert "none.yaml does not exist" in done.stderr and "Traceback" not in done.stderr


# If one fails, a verb that is given the wrong folder ends in a traceback.
@pytest.mark.parametrize("verb", [["engine", "--index", "0"], ["sandbox", "--index", "0"], ["controller"], ["summary"]])
def test_folder_that_is_no_run(verb, tmp_path, capsys):
    assert "is not the folder of a run" in refused(capsys, *verb, tmp_path)


# If this fails, a learner that is started by hand fails somewhere inside torch.
def test_learner_without_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert "RANK" in refused(capsys, "learner", tmp_path)


# If this fails, `--slurm` outside a job starts a run on the login node, or ends in a traceback.
def test_slurm_outside_a_job(recipe, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "this is not a Slurm job" in refused(capsys, "train", recipe, "--slurm")


# If this fails, the list of algorithms is not there to choose from.
def test_presets(capsys):
    assert cli.main(["presets"]) == 0
    assert "sao_recover" in capsys.readouterr().out
