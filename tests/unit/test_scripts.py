"""The shell scripts, as far as they can be judged without running them."""
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SBATCH = sorted(ROOT.glob("slurm/*.sbatch"))
SCRIPTS = SBATCH + [path for folder in ("slurm", "launch", "tools") for path in sorted(ROOT.glob(f"{folder}/*.sh"))]


# If this fails, a script does not do what it says where a name has a space or a command fails.
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# If one fails, Slurm takes an option for a comment without a word: it reads none behind the first command.
@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.name)
def test_options_stand_before_the_first_command(script):
    lines = script.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options and max(options) < first
