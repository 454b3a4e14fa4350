"""Recipes: what is wrong is said in one sentence that names the key, the value and what was expected."""
import pytest
import yaml

from sao_megatron import config as run_config
from sao_megatron.errors import UserError

RECIPE = {"name": "test", "model": {"path": "some/model"}, "task": {"name": "guess_number"}}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def refusal(recipe, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        run_config.load(recipe, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


# If this fails, a recipe that names only what has no default is refused, or a default changed its meaning.
def test_minimal_recipe(recipe):
    config = run_config.load(recipe)
    assert (config.batch.trajectories, config.algorithm.preset, config.algorithm.eps_high) == (128, "sao", None)
    assert config.run_dir.as_posix() == "runs/test"
    assert config.total_steps == config.steps + config.algorithm.critic_only_steps


# If one fails, a mistake in a recipe is silently ignored, or its message does not say where it is and what is right.
@pytest.mark.parametrize(("override", "parts"), [
    ("algorithm.eps_hihg=3", ["algorithm.eps_hihg", "unknown key", "eps_high"]),
    ("stepz=3", ["stepz", "unknown key", "steps"]),
    ("steps=many", ["steps", "integer", "'many'"]),
    ("steps=0", ["steps", "greater than or equal to 1", "0"]),
    ("algorithm.eps_low=1.5", ["algorithm.eps_low", "less than 1", "1.5"]),
    ("model.dtype=float16", ["model.dtype", "'float32' or 'bfloat16'", "'float16'"]),
    ("name=a/b", ["name", "pattern", "'a/b'"]),
    ("engine.port=70000", ["engine.port", "65535", "70000"]),
    ("task.name=null", ["task.name", "string", "None"]),
    ("model.fresh={vocab_size: 8}", ["model", "exactly one of `path`", "`fresh`"]),
    ("model.path=null", ["model", "exactly one of `path`", "`fresh`"]),
    ("batch=7", ["batch", "BatchSection", "7"]),
    ("parallel.vpp=true", ["parallel.vpp", "true is no number"]),
    ("policy_optimizer.lr=true", ["policy_optimizer.lr", "true is no number"]),
])
def test_refusals(recipe, override, parts):
    message = refusal(recipe, override)
    for part in [str(recipe), *parts]:
        assert part in message


# If this fails, ranks are started that no layout of the processes can hold.
@pytest.mark.parametrize(("overrides", "parts"), [
    (["parallel.ranks=3", "parallel.tp=2"], ["ranks=3", "tp*pp*cp = 2*1*1"]),
    (["parallel.ranks=2", "parallel.pp=2", "parallel.tp=2"], ["ranks=2", "tp*pp*cp = 2*2*1"]),
        (["parallel.ranks=6", "parallel.tp=2", "parallel.cp=2"], ["ranks=6", "tp*pp*cp = 2*1*2"]),
    (["parallel.ranks=2", "parallel.ep=4"], ["ranks=2", "ep*etp*pp = 4*1*1"]),
    (["parallel.ranks=2", "parallel.ep=2", "parallel.etp=2"], ["ranks=2", "ep*etp*pp = 2*2*1"]),
])
def test_layouts_that_do_not_fit(recipe, overrides, parts):
    message = refusal(recipe, *overrides)
    for part in ["parallel", "not a multiple", *parts]:
        assert part in message


# If this fails, a virtual pipeline without a pipeline is silently none.
def test_a_virtual_pipeline_needs_a_pipeline(recipe):
    message = refusal(recipe, "parallel.vpp=2")
    for part in ("parallel", "vpp=2 with pp=1", "set vpp=1, or pp > 1"):
        assert part in message


# If this fails, a layout that fits is refused, or data parallelism is not what the other sizes leave over.
def test_layout_that_fits(recipe):
    config = run_config.load(recipe, ["parallel.ranks=8", "parallel.tp=2", "parallel.pp=2", "parallel.ep=4"])
    assert config.parallel.dp == 2


# If this fails, a rank that hangs is never named: the collectives of the others end before the watchdog looks.
def test_the_watchdog_comes_before_the_collectives_give_up(recipe):
    assert run_config.load(recipe).collective_timeout > 1800
    assert run_config.load(recipe, ["engine.start_timeout=3600", "hang_timeout=0"]).collective_timeout >= 3600


# If this fails, an override is lost, or read as text where YAML means a number, a list or a mapping.
def test_overrides(recipe):
    config = run_config.load(recipe, ["steps=7", "algorithm.eps_high=3.0", "task.options={turns: 5}",
                                      "engine.extra_args=[--log-level, error]", "policy_optimizer.lr=1e-5",
                                      "name=other"])
    assert (config.steps, config.algorithm.eps_high, config.policy_optimizer.lr) == (7, 3.0, 1e-5)
    assert (config.task.options, config.engine.extra_args) == ({"turns": 5}, ["--log-level", "error"])
    assert config.name == "other"


# If this fails, a time limit is read as a number of seconds, and Slurm takes it for minutes.
def test_times_are_texts(recipe):
    assert run_config.load(recipe, ["cluster.time=10:00:00"]).cluster.time == "10:00:00"
    assert run_config.load(recipe, ["cluster.time=90"]).cluster.time == "90"
    assert run_config.load(recipe, ["cluster.account=08"]).cluster.account == "08"
    recipe.write_text(yaml.safe_dump(RECIPE) + "cluster: {time: 2:30:00}\n")
    assert run_config.load(recipe).cluster.time == "2:30:00"


# If this fails, 1e-6 in model.fresh or in a task's options is a text, or a name like it becomes a number on resume.
def test_numbers_without_a_point(recipe, tmp_path):
    config = run_config.load(recipe, ["task.options.rate=1e-6", "task.options.other=-2E+3", 'name="1e5"'])
    assert config.task.options["rate"] == 1e-6 and config.task.options["other"] == -2000.0
    run_config.save(config, tmp_path / "saved.yaml")
    assert run_config.load(tmp_path / "saved.yaml") == config and config.name == "1e5"


# If one fails, a mistyped override is taken for something else.
@pytest.mark.parametrize(("override", "part"), [
    ("steps", "'steps' is not of the form key.subkey=value"),
    ("=3", "'=3' is not of the form key.subkey=value"),
    ("name.first=x", "'name' is not a section"),
    ("steps=[1", "steps=[1"),
])
def test_malformed_overrides(recipe, override, part):
    assert part in refusal(recipe, override)


# If one fails, a recipe file that is none gives a traceback, or half of a section that is given twice is lost.
@pytest.mark.parametrize(("text", "part"), [("- a\n- b\n", "mapping of sections, got list"), ("a: [", "not valid YAML"),
                                            ("", "mapping of sections, got NoneType"),
                                            ("sandbox: {seconds: 30}\nsandbox: {servers: 2}\n",
                                             "the key 'sandbox' is given twice")])
def test_files_that_are_no_recipe(tmp_path, text, part):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    message = refusal(path)
    assert part in message and str(path) in message


# If this fails, a mistyped path gives a traceback.
def test_missing_recipe(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere.yaml")


# If this fails, the processes of a run work with another config than the one that was checked.
def test_saved_config_loads_as_the_same(recipe, tmp_path):
    config = run_config.load(recipe, ["steps=7", "parallel.ranks=2", "parallel.ep=2"])
    run_config.save(config, tmp_path / "config.yaml")
    assert run_config.load(tmp_path / "config.yaml") == config
