"""Prompt files, mixtures and the limits of an episode."""
import asyncio
import collections
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from test_episode import SETTINGS, FakeEngine, TalkTask, binary_search, two_words

from sao_megatron.config import LimitsSection, parse
from sao_megatron.errors import RunError, UserError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.tasks import load_task, runs_code
from sao_megatron.rollout.tasks.base import Prompt, Step
from sao_megatron.rollout.tasks.sources import PromptSource
from sao_megatron.trajectory.types import Status

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(23)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def write(folder, form):
    """ROWS as a file or folder of that form; returns its path."""
    folder.mkdir()
    table = pyarrow.Table.from_pylist(ROWS)
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_text(LINES.replace("\n", "\n\n"))  # empty lines are nothing
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(LINES.encode()))
    elif form == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif form == "folder":
        for name, part in (("b", table.slice(10)), ("a", table.slice(0, 10))):
            pyarrow.parquet.write_table(part, folder / f"{name}.parquet")
        return folder
    else:  # as the library datasets saves one to disk
        with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        return folder
    return path


# If one fails, a form of prompt file is read wrongly or not at all.
@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet", "folder", "dataset"])
def test_every_form_has_the_same_rows(tmp_path, form):
    source = PromptSource(write(tmp_path / "prompts", form), ["question", "answer"])
    assert [source.rows[number] for number in range(len(source.rows))] == ROWS
    same = PromptSource(write(tmp_path / "lines", "jsonl"), ["question"])
    assert [source.row(index) for index in range(60)] == [same.row(index) for index in range(60)]


# If this fails, an epoch repeats or leaves out rows, all epochs have one order, a restart changes the order, or rows
# for evaluation are trained on.
def test_order(tmp_path):
    path = write(tmp_path / "prompts", "jsonl")
    source, again = (PromptSource(path, ["answer"], seed=3, held_out=5) for _ in range(2))
    epochs = [[source.row(18 * epoch + place)[0] for place in range(18)] for epoch in range(3)]
    assert len(set(epochs[0])) == 18 and set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1]
    assert [again.row(index)[0] for index in reversed(range(54))] == [n for epoch in epochs for n in epoch][::-1]
    held_out = {json.dumps(row) for _, row in source.evaluation(5)}
    assert len(held_out) == 5 and not held_out & {json.dumps(source.row(index)[1]) for index in range(18)}
    assert source.evaluation(3) == again.evaluation(5)[:3]
    assert [PromptSource(path, [], seed=4).row(index)[0] for index in range(18)] != epochs[0]
    with pytest.raises(UserError, match="evaluation.episodes=6, and 5 prompts"):
        source.evaluation(6)


# If this fails, prompts cannot be made by a class of one's own.
def test_prompts_of_a_class(tmp_path):
    path = tmp_path / "made.py"
    path.write_text("class Sums:\n    def __len__(self): return 50\n"
                    "    def __getitem__(self, number): return {'answer': 2 * number}\n")
    source = PromptSource(f"{path}:Sums", ["answer"], held_out=10)
    assert sorted(source.row(index)[1]["answer"] for index in range(40)) != list(range(0, 80, 2))
    assert len({source.row(index)[0] for index in range(40)} | {n for n, _ in source.evaluation(10)}) == 50


# If this fails, evaluation draws from the training file though there is one of its own.
def test_evaluation_file(tmp_path):
    path, other = write(tmp_path / "prompts", "jsonl"), tmp_path / "other.jsonl"
    other.write_text('{"answer": "x"}\n')
    source = PromptSource(path, ["answer"], evaluation=other)
    assert source.evaluation(1) == [("evaluation-0", {"answer": "x"})]
    assert len({source.row(index)[0] for index in range(23)}) == 23


# If one fails, a prompt file that cannot be used is found by a running job only, or its fault is not named.
@pytest.mark.parametrize("name, text, match", [
    ("none.jsonl", None, "do not exist"), ("a.csv", "x", "end in '.csv'"), ("a.jsonl", "", "no rows"),
    ("a.jsonl", '{"query": 1}\n', "first row has no question, answer; it has query"),
    ("a.parquet", "no parquet", "cannot be read")])
def test_refused_files(tmp_path, name, text, match):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=match):
        PromptSource(tmp_path / name, ["question", "answer"])


# If this fails, a folder of splits is taken for data, or an empty folder for a file.
def test_refused_folders(tmp_path):
    with pytest.raises(UserError, match="without files"):
        PromptSource(tmp_path, [])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="splits train, test: give one"):
        PromptSource(tmp_path, [])


# If this fails, a broken line deep in a file ends in a traceback.
def test_broken_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n[3]\n')
    rows = PromptSource(tmp_path / "a.jsonl", ["a"]).rows
    for number, match in ((1, "row 1 is not JSON"), (2, "row 2 is list")):
        with pytest.raises(RunError, match=match):
            rows[number]


def mixture(**weights):
    tasks = {label: {"name": "guess_number", "weight": weight, "options": {"seed": place}}
             for place, (label, weight) in enumerate(weights.items())}
    return load_task("mixture", {"tasks": tasks}, None)


# If this fails, a task gets more or less than its share, loses prompts, or a restart deals differently.
def test_mixture_shares():
    task, again = mixture(a=0.5, b=2, c=1.5), mixture(a=0.5, b=2, c=1.5)
    prompts = [task.prompt(index) for index in range(800)]
    labels = [prompt.id.split(":")[0] for prompt in prompts]
    assert collections.Counter(labels) == {"a": 100, "b": 400, "c": 300}
    for block in range(100):
        assert collections.Counter(labels[8 * block:8 * block + 8]) == {"a": 1, "b": 4, "c": 3}
    assert len({tuple(labels[8 * block:8 * block + 8]) for block in range(100)}) > 20
    assert [again.prompt(index).id for index in (799, 5, 300)] == [prompts[index].id for index in (799, 5, 300)]
    own = load_task("guess_number", {"seed": 1}, None)
    assert [p.data for p in prompts if p.id.startswith("b:")] == [own.prompt(index).data for index in range(400)]
    assert collections.Counter(p.task.name for p in task.evaluation_prompts(16)) == {"a": 2, "b": 8, "c": 6}


# If this fails, an episode of a mixture is played by another task's rules or limits, or is not counted under its label.
def test_mixture_plays_each_task_by_its_rules():
    tasks = {"four": {"name": "guess_number", "weight": 1},
             "one": {"name": "guess_number", "limits": {"turns": 1}, "options": {"turns": 3}}}
    task = load_task("mixture", {"tasks": tasks}, None)
    for prompt in (task.prompt(index) for index in range(6)):
        prompt = Prompt(prompt.id, 11, prompt.task, prompt.limits)
        played = asyncio.run(run_episode(FakeEngine(binary_search), task, prompt, SETTINGS, 0))
        label = prompt.id.split(":")[0]
        assert (played.task, played.info["turns"]) == (label, {"four": 4, "one": 1}[label])
        assert played.status is (Status.COMPLETED if label == "four" else Status.TRUNCATED)


# If this fails, a mixture cannot warm up a fresh model.
def test_mixture_demonstrations():
    tasks = {"a": {"name": "guess_number"}, "b": {"name": "guess_number"}}
    shown = list(load_task("mixture", {"tasks": tasks}, None).demonstrations(5, 0))
    assert collections.Counter(trajectory.task for trajectory in shown) == {"a": 3, "b": 2}


# If one fails, a mixture that cannot be dealt is found by a running job only.
@pytest.mark.parametrize("tasks, match", [
    ({}, "at least one task"), ({"a": {"name": "guess_number", "weight": 0}}, "a.weight"),
    ({"a": {"name": "guess_number", "wieght": 1}}, "a.wieght"), ({"a": {"name": "nothing"}}, "unknown task 'nothing'"),
    ({"a": {"name": "guess_number", "weight": 1e-5}, "b": {"name": "guess_number"}}, "come out even only after")])
def test_refused_mixtures(tasks, match):
    with pytest.raises(UserError, match=match):
        load_task("mixture", {"tasks": tasks}, None)


# If this fails, a run starts without the sandbox that its task needs, or looks for one that it does not need.
def test_which_tasks_run_code():
    assert runs_code("coding", {}) and not runs_code("guess_number", {})
    tasks = {"a": {"name": "guess_number"}}
    assert not runs_code("mixture", {"tasks": tasks})
    assert runs_code("mixture", {"tasks": tasks | {"b": {"name": "coding"}}})


class Slow(TalkTask):
    """Answers after `seconds`, and notes that it was closed."""

    max_turns = 50

    def __init__(self, seconds, *script):
        super().__init__(*script)
        self.seconds, self.closed = seconds, 0

    async def step(self, action):
        await asyncio.sleep(self.seconds)
        return await super().step(action)

    async def close(self):
        self.closed += 1


def played(task, **limits):
    settings = EpisodeSettings(**vars(SETTINGS) | {"limits": LimitsSection(**limits), "environment_retries": 0,
                                                   "max_tokens": 400})
    return asyncio.run(run_episode(FakeEngine(two_words), task, Prompt("p"), settings, 0))


# If one fails, an episode goes on past a limit of its recipe, or what it did until then is not kept.
@pytest.mark.parametrize("limits, turns", [({"turns": 2}, 2), ({"tokens": 9}, 2), ({"seconds": 0.2}, None)])
def test_limits(limits, turns):
    task = Slow(0.03, Step([5]))
    trajectory = played(task, **limits)
    assert trajectory.status is Status.TRUNCATED and task.closed == 1
    assert trajectory.info["turns"] == turns or (turns is None and 1 <= trajectory.info["turns"] <= 8)
    assert bool(trajectory.info.get("out_of_time")) == ("seconds" in limits)


# If this fails, an environment that never answers keeps its episode for ever.
def test_environment_that_never_answers():
    task = Slow(1000, Step([5]))
    trajectory = played(task, seconds=0.1)
    assert trajectory.status is Status.TRUNCATED and trajectory.info["out_of_time"] and task.closed == 1
    assert trajectory.tokens.tolist() == [1, 6, 7, 2]


# If this fails, an environment's own timeout passes for the episode's, or what it holds is kept after a failure.
def test_environments_own_timeout_is_an_error():
    task = Slow(0, TimeoutError("my service"))
    trajectory = played(task, seconds=100)
    assert trajectory.status is Status.ERROR and "my service" in trajectory.info["error"] and task.closed == 1


# If this fails, what an environment holds outlives an episode that is cancelled.
def test_closed_where_cancelled():
    task = Slow(1000, Step([5]))

    async def cancel():
        episode = asyncio.create_task(run_episode(FakeEngine(two_words), task, Prompt("p"), SETTINGS, 0))
        await asyncio.sleep(0.1)
        episode.cancel()
        await asyncio.wait([episode])
        assert episode.cancelled()
    asyncio.run(cancel())
    assert task.closed == 1


# If this fails, limits of a recipe are not read, or not checked.
def test_limits_of_a_recipe():
    recipe = {"name": "x", "model": {"path": "m"}, "task": {"name": "guess_number", "limits": {"seconds": 5}}}
    assert EpisodeSettings.of(parse(recipe)).limits.seconds == 5
    with pytest.raises(UserError, match="task.limits.turns"):
        parse(recipe | {"task": {"name": "guess_number", "limits": {"turns": 0}}})
