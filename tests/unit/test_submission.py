"""`sao-megatron submit`: what is refused before a job queues, what the job asks Slurm for, the recipes for clusters.

What a real Slurm makes of it is tested in tests/slurm.
"""
from pathlib import Path

import pytest
import yaml

from sao_megatron import cli
from sao_megatron import config as run_config
from sao_megatron.submission import sbatch

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = ["qwen3-30b-a3b-math", "qwen3-30b-a3b-coding", "glm-4.5-air-math", "glm-5-coding"]
MATH = CONFIGS / "qwen3-30b-a3b-math.yaml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A machine without Slurm, in a folder without runs and checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


def dry_run(recipe: Path, *overrides: str) -> int:
    return cli.main(["submit", str(recipe), "--dry-run", *overrides])


def refusal(capsys, recipe: Path, *overrides: str) -> str:
    assert dry_run(recipe, *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("sao-megatron: ") and error.count("\n") == 1
    return error


# If one fails, a recipe for a cluster does not fit the machines that it names.
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_a_dry_run(name, capsys, tmp_path):
    assert dry_run(CONFIGS / f"{name}.yaml") == 0
    out = capsys.readouterr().out
    assert f"sbatch --job-name={name}" in out and "CUDA, NCCL, fragmentation" in out
    assert not list(tmp_path.iterdir())  # a dry run leaves nothing behind


# If one fails, a recipe's comments promise a variant that does not fit, or say of one that fits that it does not.
@pytest.mark.parametrize(("name", "overrides", "fits"), [
    ("qwen3-30b-a3b-math", "parallel.recompute=none", False),
    ("qwen3-30b-a3b-math", "cluster.learner_nodes=4 parallel.ranks=32 parallel.ep=32 cluster.gpu_memory_gb=47", True),
    ("qwen3-30b-a3b-math", "rollout.max_tokens=65536 batch.tokens_per_micro_batch=65536 cluster.gpu_memory_gb=75",
     True),
    ("glm-4.5-air-math", "algorithm.preset=sao", False),
    ("glm-4.5-air-math", "algorithm.preset=sao cluster.gpu_memory_gb=139", True),
    ("glm-4.5-air-math", "algorithm.preset=sao cluster.learner_nodes=8 parallel.ranks=64 parallel.ep=64", True),
    ("glm-5-coding", "rollout.max_tokens=65536", False),
    ("glm-5-coding", "algorithm.preset=sao cluster.gpu_memory_gb=139 cluster.learner_nodes=48 cluster.rollout_nodes=16 "
                     "parallel.ranks=384 parallel.pp=6 parallel.ep=64 engine.count=4", True)])
def test_variants_that_recipes_name(name, overrides, fits, capsys):
    if fits:
        assert dry_run(CONFIGS / f"{name}.yaml", *overrides.split()) == 0
    else:
        assert "a learner rank needs about" in refusal(capsys, CONFIGS / f"{name}.yaml", *overrides.split())


# If one fails, the mistake is found after the job has waited in the queue, on all its nodes.
@pytest.mark.parametrize(("overrides", "parts"), [
    ("cluster.learner_nodes=3", ["cluster.learner_nodes=3", "parallel.ranks=16"]),
    ("cluster.gpus_per_node=4", ["parallel.ranks=16", "2 × 4 = 8"]),
    ("engine.count=3", ["3 × 4 = 12", "2 × 8 = 16"]),
    ("parallel.tp=8 parallel.cp=2", ["parallel.tp=8", "num_key_value_heads=4"]),
    ("rollout.max_tokens=300000", ["rollout.max_tokens=300000", "max_position_embeddings=262144"]),
    ("engine.count=16 engine.tp=1", ["KV cache", "rollout.max_tokens=131072", "engine.tp=1"]),
    ("cluster.gpu_memory_gb=40", ["a learner rank needs about 77 GiB", "cluster.gpu_memory_gb=40"]),
    ("algorithm.preset=grpo batch.trajectories=100", ["batch.trajectories=100", "multiple"]),
    ("mode=replay", ["mode=replay"]),
    ("task.options.turns=3", ["task math_python has no option 'turns'", "calls"]),
    ("task.name=maths", ["unknown task 'maths'", "math_python"]),
    ("model.path=models/unheard-of", ["models/unheard-of does not exist", "--dry-run"]),
])
def test_what_is_refused(overrides, parts, capsys):
    message = refusal(capsys, MATH, *overrides.split())
    assert all(part in message for part in parts)


# If this fails, a run that fills the disk with its checkpoints is queued without a word.
def test_the_disk_that_checkpoints_take(capsys):
    assert dry_run(MATH) == 0
    # 14 bytes of each parameter of policy and critic, but 2 of the critic's frozen attention.
    assert "checkpoints: 782 GiB each, 2,346 while one is written beside checkpoint.keep=2" in capsys.readouterr().out


# If this fails, a job without its checkpoint, or without a cluster, seems to be queued.
def test_a_real_submission_needs_checkpoint_and_slurm(capsys, tmp_path):
    assert cli.main(["submit", str(MATH)]) == 2
    assert "folder models/qwen3-30b-a3b does not exist: put the checkpoint" in capsys.readouterr().err
    assert cli.main(["submit", str(fresh(tmp_path))]) == 2
    assert "no Slurm controller answers" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def fresh(tmp_path) -> Path:
    """A recipe for CPU nodes, whose model needs no files."""
    recipe = yaml.safe_load((CONFIGS / "guess-number-cpu.yaml").read_text())
    recipe |= {"cluster": {"learner_nodes": 2, "rollout_nodes": 1}}
    path = tmp_path / "fresh.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


# If this fails, the task of a model that is here is not looked at before the job queues.
def test_the_task_is_checked_where_the_model_is(capsys, tmp_path):
    assert dry_run(fresh(tmp_path)) == 0
    assert "unknown task 'nothing'" in refusal(capsys, fresh(tmp_path), "task.name=nothing")
    assert not [part for part in sbatch.command(run_config.load(fresh(tmp_path))) if "gres" in part]


# If this fails, a run is queued again with another algorithm, and refused when its job starts.
def test_a_run_that_exists_goes_on_as_it_was(capsys, tmp_path):
    config = run_config.load(fresh(tmp_path))
    config.run_dir.mkdir(parents=True)
    run_config.save(config, config.run_dir / "config.yaml")
    assert dry_run(fresh(tmp_path), "cluster.time=10:00:00") == 0
    assert "cannot change algorithm.eps_high" in refusal(capsys, fresh(tmp_path), "algorithm.eps_high=3.0")


def options(**cluster) -> list[str]:
    config = run_config.load(MATH)
    return sbatch.command(config.model_copy(update={"cluster": config.cluster.model_copy(update=cluster)}))


# If this fails, Slurm is asked for other nodes than the recipe names, or an option does not reach it.
def test_options_of_one_component():
    parts = options(account="mine", learner_partition="h100", spare_nodes=1, sbatch_args=["--qos=high"])
    assert parts[0] == "sbatch" and ":" not in parts
    assert parts[-1] == "runs/qwen3-30b-a3b-math.submitted.yaml" and parts[-2].endswith("slurm/train.sbatch")
    assert {"--nodes=5", "--time=24:00:00", "--gres=gpu:8", "--partition=h100", "--account=mine", "--qos=high",
            "--exclusive", "--mem=0", "--no-kill", "--signal=B:USR1@3600"} <= set(parts)
    assert "--dependency=singleton" in options(chain=3) and "--dependency=singleton" not in options()
    assert not [part for part in options(gres="") if "gres" in part]


# If this fails, learner and engines of a mixed cluster land on each other's nodes.
def test_options_of_two_components():
    parts = options(learner_partition="h100", rollout_partition="l40", spare_nodes=1, sbatch_args=["--qos=high"])
    learner, engines = parts[1:parts.index(":")], parts[parts.index(":") + 1:-2]
    assert {"--nodes=3", "--partition=h100", "--qos=high", "--signal=B:USR1@3600"} <= set(learner)
    assert {"--nodes=2", "--partition=l40", "--qos=high", "--gres=gpu:8", "--time=24:00:00"} <= set(engines)


# If one fails, a node's GPUs are miscounted, and a recipe that fits is refused or one that does not is queued.
@pytest.mark.parametrize(("gres", "gpus"), [
    ("gpu:8", 8), ("gpu:h100:8(S:0-1)", 8), ("nvme:1,gpu:a100:4(S:0)", 4), ("gpu:h100:4,gpu:l40:2", 6), ("(null)", 0),
    ("mygpu:3", 0)])
def test_gpus_of_a_node(gres, gpus):
    assert sbatch.gpus_in(gres) == gpus
