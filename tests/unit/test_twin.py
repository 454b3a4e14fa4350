"""tools/twin.py: the rehearsal of a cluster recipe on two cores, which must rehearse the same things."""
import importlib.util
from pathlib import Path

import pytest

from sao_megatron import cli
from sao_megatron import config as run_config
from sao_megatron.config import ParallelSection

ROOT = Path(__file__).parents[2]
NAMES = ["qwen3-30b-a3b-math", "qwen3-30b-a3b-coding", "glm-4.5-air-math", "glm-5-coding"]
_SPEC = importlib.util.spec_from_file_location("twin", ROOT / "tools" / "twin.py")
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)


def kinds(parallel: ParallelSection) -> set[str]:
    return {name for name in ("tp", "pp", "cp", "ep", "etp") if getattr(parallel, name) > 1}


# If one fails, a twin rehearses another algorithm, family or kind of parallelism than its recipe has.
@pytest.mark.parametrize("name", NAMES)
def test_what_a_twin_keeps(name):
    recipe, twin = run_config.load(ROOT / f"configs/{name}.yaml"), tool.twin(ROOT / f"configs/{name}.yaml")
    assert kinds(twin.parallel) == kinds(recipe.parallel) and twin.parallel.recompute == recipe.parallel.recompute
    assert twin.parallel.ranks <= 4 and twin.parallel.ranks % twin.cluster.learner_nodes == 0
    same = recipe.algorithm.model_dump(exclude={"critic_only_steps"})
    assert twin.algorithm.model_dump(exclude={"critic_only_steps"}) == same
    assert twin.rollout.max_lag == recipe.rollout.max_lag and twin.publication.mode == recipe.publication.mode


# If this fails, a twin of a recipe with one copy of the experts has two, and rehearses another exchange.
def test_one_copy_of_the_experts_stays_one():
    layout = tool.shrunk_layout(ParallelSection(ranks=64, tp=4, cp=4, pp=2, ep=32))
    assert layout["ep"] * layout["pp"] * layout["etp"] == layout["ranks"] == 8
    assert tool.shrunk_layout(ParallelSection(ranks=64, tp=4, cp=4, pp=2, ep=8))["ep"] == 2


# If this fails, the engine of a twin with sparse attention computes another attention than its learner, or none at all.
def test_sparse_attention_is_served_as_the_dense_one_that_it_equals():
    sparse, other = (tool.twin(ROOT / f"configs/{name}.yaml") for name in ("glm-5-coding", "glm-4.5-air-math"))
    assert sparse.model.fresh["index_topk"] >= sparse.rollout.max_tokens
    assert "Glm4MoeLiteForCausalLM" in sparse.engine.extra_args[1] and not other.engine.extra_args


# If this fails, the tool writes what `submit` refuses.
@pytest.mark.parametrize("name", NAMES)
def test_a_twin_passes_a_dry_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_config.save(tool.twin(ROOT / f"configs/{name}.yaml"), tmp_path / "twin.yaml")
    assert cli.main(["submit", "twin.yaml", "--dry-run"]) == 0
