"""Tasks that talk and run code, over a real chat template, tokenizer and sandbox; what the model says is scripted."""
import asyncio
import json
from pathlib import Path

import chat_folder
import pytest
from test_episode import SETTINGS, FakeEngine

from sao_megatron import config as run_config
from sao_megatron import launcher
from sao_megatron.config import LimitsSection
from sao_megatron.errors import UserError
from sao_megatron.rollout.episode import EpisodeSettings, run_episode
from sao_megatron.rollout.half_done import Diary
from sao_megatron.rollout.tasks import load_task
from sao_megatron.rollout.tasks.bfcl import MORE_TOOLS, _data, _solutions
from sao_megatron.rollout.tasks.chat_task import fenced_code
from sao_megatron.rollout.tasks.math_python import last_boxed
from sao_megatron.run_folder import RunFolder
from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.pool import Pool
from sao_megatron.sandbox.session import SandboxError
from sao_megatron.trajectory.types import Status

ROOT = Path(__file__).parents[2]
BFCL = ["bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"]
MATHS = ["math_verify"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder.save(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    rows = [{"question": f"What is {n}/2?", "answer": f"\\frac{{{n}}}{{2}}"} for n in range(1, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(name, options, folder, *turns, prompt=None, ended=True, module=None):
    """Play `turns`, texts of the model, or functions of the task and prompt that make them; returns (context, steps).

    The sandbox has one place, so an episode that holds one while it waits for another never ends.
    """
    async def play():
        async with Pool(Limits(seconds=10), sessions=1, cells=1, warm=1, modules=module or []) as sandbox:
            task = load_task(name, options, folder, sandbox)
            asked = task.prompt(0) if prompt is None else prompt(task)
            environment = task.environment(asked)
            context, steps = await environment.reset(), []
            for turn in turns:
                text = turn if isinstance(turn, str) else turn(asked)
                action = task.template.encode(text) + task.stop_token_ids[:1] * ended
                steps.append(await asyncio.wait_for(environment.step(action), 60))
                step = steps[-1]
                context = step.context or context + action + step.observation
            if close := getattr(environment, "close", None):
                await close()
            assert sandbox.open_sessions == 0
            return task.template.tokenizer.decode(context), steps
    try:
        return asyncio.run(play())
    except SandboxError as error:
        pytest.skip(str(error))


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# If this fails, a tool's answer does not reach the model, variables are lost between calls, or a right answer in
# another form is not rewarded.
def test_maths_with_calls(folder, questions):
    context, steps = talk("math_python", {"prompts": questions}, folder, call("python", code="x = 21\nx / 2"),
                          call("python", code="print(x * 2)"), call("python", cod="?") + call("pyhton", code="1"),
                          lambda prompt: f"So it is \\boxed{{{int(prompt.data[0].split('/')[0].split()[-1]) / 2}}}.",
                          module=MATHS)
    assert [(step.reward, step.done) for step in steps] == [(0, False)] * 3 + [(1.0, True)]
    assert steps[-1].info == {"solved": True, "calls": 2, "answered": True}
    assert "<tool_response>\n10.5" in context and "<tool_response>\n42" in context and '"name": "python"' in context
    assert "There is one tool, python" in context or "pyhton" in context


# If this fails, models whose template knows no tools cannot run code, or their answer is not found.
def test_maths_with_blocks(folder, questions):
    examples = [{"role": "user", "content": "What is 1/1?"}, {"role": "assistant", "content": "An example: \\boxed{1}"}]
    options = {"prompts": questions, "tools": "blocks", "examples": examples}
    context, steps = talk("math_python", options, folder, "I compute it:\n```python\nprint('seven')\n1/0\n```",
                          lambda prompt: f"\\boxed{{{prompt.data[1]}}}")
    assert context.index("An example") < context.index("/2?") < context.index("```output\nseven\nTraceback")
    assert "ZeroDivisionError" in context and "<tools>" not in context
    assert steps[1].done and steps[1].info == {"solved": True, "calls": 1, "answered": True}


# If one fails, an answer that is wrong, missing, or made to keep the judge busy is rewarded or holds up the run.
@pytest.mark.parametrize("answer", ["\\boxed{77}", "the answer is 1/2", "\\boxed{}", "\\boxed{x", "\\boxed{\\frac{1}}",
                                    "\\boxed{True}", "\\boxed{$) or print('True') or ($}"])
def test_wrong_answers(folder, questions, answer):
    _, [step] = talk("math_python", {"prompts": questions}, folder, answer, module=MATHS)
    assert (step.reward, step.done, step.info["solved"]) == (0.0, True, False)


# If this fails, a turn that a budget has cut off is judged as if the model had ended it.
def test_cut_off_turn(folder, questions):
    _, [step] = talk("math_python", {"prompts": questions}, folder, lambda prompt: f"\\boxed{{{prompt.data[1]}}}",
                     ended=False)
    assert not step.done and step.reward == 0


# If one fails, the wrong part of an answer is judged.
@pytest.mark.parametrize("text, answer", [("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), ("none", None),
                                          ("\\boxed{{a}", None), ("\\boxed{}", "")])
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


# If this fails, the wrong code of an answer is run.
def test_fenced_code():
    assert fenced_code("```py\na\n```\nor\n```python\nb\nc\n```") == "b\nc\n"
    assert fenced_code("```\nplain\n```") == "plain\n" and fenced_code("no code") is None


def first(task):
    """HumanEval/0."""
    return task._prompt("0", task.source.rows[0])


def solution(task_prompt):
    return task_prompt.data["prompt"] + ("    return any(abs(a - b) < threshold for i, a in enumerate(numbers) "
                                         "for b in numbers[:i])\n")


# If this fails, code that passes the tests is not rewarded, or a failure is not shown where there is another try.
def test_coding(folder):
    wrong = "```python\ndef has_close_elements(n, threshold): return True\n```"
    context, steps = talk("coding", {"tries": 2}, folder, wrong,
                          lambda prompt: f"Better:\n```python\n{solution(prompt)}```", prompt=first)
    assert [(step.reward, step.done) for step in steps] == [(0, False), (1.0, True)]
    assert "A test failed" in context and "AssertionError" in context


ALWAYS_EQUAL = """
class Both(int):
    def __eq__(self, other): return True
    def __bool__(self): return True
    def __reduce__(self): return (eval, ("setattr(__import__('builtins'), 'bool', 1)",))
def has_close_elements(n, threshold): return Both()
"""
DECEIVING = [ALWAYS_EQUAL, """
import builtins, inspect, os, sys
for place in (builtins, sys.modules["__main__"]):
    place.check = lambda candidate: None
for frame in inspect.stack():
    frame.frame.f_globals.update(check=lambda candidate: None, Candidate=lambda *words: None)
for descriptor in range(3, 128):
    try: os.write(descriptor, b"+" * 9)
    except OSError: pass
def has_close_elements(n, threshold): return True
"""]
"""Make the tests pass where they run in the code's interpreter."""


# If one fails, code that fails, does not end, ends the interpreter, deceives its tests, or is none is rewarded.
@pytest.mark.parametrize("code", ["def has_close_elements(n, threshold): return True", "import os; os._exit(0)",
                                  "def (", "raise SystemExit",
                                  "def has_close_elements(n, threshold): raise SystemExit(0)",
                                  "def has_close_elements(n, threshold):\n    import os; os._exit(0)",
                                  *DECEIVING])
def test_coding_failures(folder, code):
    _, [step] = talk("coding", {}, folder, f"```python\n{code}\n```", prompt=first)
    assert (step.reward, step.done, step.info["solved"]) == (0.0, True, False)


PLANTED = """
open("colorsys.py", "w").write('''
import sys
sys.modules["__main__"].Candidate.__call__ = lambda *words: 4
''')
def double(x): return 5
"""


def exercise(folder, rows, entry, test, code):
    rows.write_text(json.dumps({"prompt": f"def {entry}(x):\n", "test": test, "entry_point": entry}) + "\n")
    return talk("coding", {"prompts": str(rows)}, folder, f"```python\n{code}\n```")[1][0]


# If this fails, code can leave a module for its tests to import.
def test_coding_tests_import_nothing_of_the_code(folder, tmp_path):
    test = "def check(f):\n    import colorsys\n    assert f(2) == 4"
    for code, reward in (("def double(x): return 2 * x", 1), (PLANTED, 0)):
        assert exercise(folder, tmp_path / "rows.jsonl", "double", test, code).reward == reward


# If this fails, tests that cannot judge are trained on as wrong answers.
def test_coding_tests_that_do_not_fit(folder, tmp_path):
    test = "def check(f): assert f(lambda: 1) == 1"
    with pytest.raises(RuntimeError, match="its tests call apply with what is no plain data"):
        exercise(folder, tmp_path / "rows.jsonl", "apply", test, "def apply(f): return f()")


def rows_of_files(category):
    rows = [json.loads(line) for line in _data(f"BFCL_v4_multi_turn_{category}.json").read_text().splitlines()]
    return [row for row in rows if row["involved_classes"] == ["GorillaFileSystem"]]


def dialogue(task):
    """The first over files only."""
    return task._prompt(rows_of_files(task.category)[0])


def solved_requests(category):
    """For each request of that dialogue the turns that solve it."""
    return [[_as_call(text) for text in request] for request in _solutions(category)[rows_of_files(category)[0]["id"]]]


def _as_call(text):
    """A solution's call, which is Python, as the model's format has it."""
    import ast
    node = ast.parse(text, mode="eval").body
    assert not node.args, text
    return call(node.func.id, **{key.arg: ast.literal_eval(key.value) for key in node.keywords})


# If one fails, the leaderboard's own solution is not rewarded, requests and answers do not reach the model, or it can
# call functions before they are offered.
@pytest.mark.parametrize("category", ["base", "miss_func"])
def test_bfcl_solution(folder, category):
    turns = [turn for request in solved_requests(category) for turn in [*request, "It is done."]]
    context, steps = talk("bfcl", {"category": category}, folder, *turns, prompt=dialogue, module=BFCL)
    assert steps[-1].done and steps[-1].reward == 1.0 and steps[-1].info["solved"]
    assert [step.done for step in steps[:-1]] == [False] * (len(steps) - 1)
    assert "<tool_response>" in context and '"name": "grep"' in context
    [missing] = rows_of_files(category)[0].get("missed_function", {"": []}).values()
    prompt, _ = talk("bfcl", {"category": category}, folder, prompt=dialogue, module=BFCL)
    for name in missing:
        assert f'"name": "{name}"' in context and f'"name": "{name}"' not in prompt
    assert (MORE_TOOLS in context) == (category == "miss_func") == any(step.context for step in steps)


# If this fails, saying that it is done is enough where a call for an earlier request has brought the answer already.
def test_bfcl_needs_a_call(folder):
    row = next(row for row in rows_of_files("base") if row["id"] == "multi_turn_base_6")
    make, write, read = ([_as_call(text) for text in request] for request in _solutions("base")[row["id"]][:3])
    turns = [*make, "Done.", *write, *read, "Done.", "I have read it already."]
    _, steps = talk("bfcl", {}, folder, *turns, prompt=lambda task: task._prompt(row), module=BFCL)
    assert steps[-1].done and steps[-1].reward == 0 and steps[-1].info["requests_right"] == 2


# If this fails, a request that was not fulfilled goes unnoticed, or code in a call is evaluated outside of the sandbox.
def test_bfcl_failure(folder, tmp_path):
    tmp_path.chmod(0o777)
    escaped = tmp_path / "escaped"
    evil = call("pwd", **{"x": f"__import__('os').system('touch {escaped}')"})
    _, steps = talk("bfcl", {}, folder, evil, call("rm_everything"), "It is done.", prompt=dialogue, module=BFCL)
    assert steps[-1].done and steps[-1].reward == 0 and steps[-1].info == {"solved": False, "requests_right": 0}
    assert not escaped.exists()


CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ls", "arguments": {"a": True}}}]}


# If this fails, dialogues need services that were not asked for, or a model without a template of calls cannot be used.
def test_bfcl_of_some_services_with_another_template(tmp_path):
    plain = chat_folder.save(tmp_path, "forgetful")
    template = ROOT / "configs" / "chatml-tools.jinja"
    task = load_task("bfcl", {"services": ["MathAPI", "GorillaFileSystem"], "held_out": 3,
                              "examples": [{"role": "user", "content": "Which files are here?"}, CALLED],
                              "chat_template": str(template)}, plain, Pool(Limits(), 1, 1, 0, []))
    rows = [task.prompt(index).data for index in range(30)]
    assert {service for row in rows for service in row["involved_classes"]} == {"MathAPI", "GorillaFileSystem"}
    assert len({row["id"] for row in rows}) == 13 + 12 - 3
    chat = task.environment(task.prompt(0)).chat
    prompt = task.template.decode(chat.prompt())
    assert "grep(file_name: string, pattern: string) Search" in prompt
    question = chat.messages[-1]["content"]
    assert prompt.index("Which files are here?") < prompt.index('"name": "ls"') < prompt.index(question)
    with pytest.raises(UserError, match="chat_template nowhere.jinja does not exist"):
        load_task("bfcl", {"chat_template": "nowhere.jinja"}, plain)


# If this fails, a game's words do not reach the model, or winning is not rewarded.
def test_text_game(folder):
    context, steps = talk("textarena", {"game": "GuessTheNumber-v0", "turns": 30}, folder, "I say [3]",
                          *(f"[{number}]" for number in [1, 2, *range(4, 8)]))
    assert "You are playing Guess The Number" in context and "The target number is" in context
    assert all(step.reward == 0 and not step.done for step in steps[:3])
    task = load_task("textarena", {"game": "GuessTheNumber-v0"}, folder)
    game = task.environment(task.prompt(5))
    asyncio.run(game.reset())
    secret = game.game.state.game_state["game_number"]
    step = asyncio.run(game.step(task.template.encode(f"[{secret}]") + task.stop_token_ids[:1]))
    assert (step.reward, step.done, step.info["solved"]) == (1.0, True, True)


# If one fails, a task that cannot be played here is found by a running job only.
@pytest.mark.parametrize("name, options, match", [
    ("textarena", {"game": "Chess-v0"}, "Chess-v0.*cannot be played alone"),
    ("textarena", {"game": "NoGame-v0"}, "NoGame-v0.*cannot be played"),
    ("math_python", {"prompts": "nowhere.jsonl"}, "nowhere.jsonl do not exist"),
    ("math_python", {"prompts": "x", "tools": "shell"}, "expected calls or blocks"),
    ("math_python", {"prompts": "x", "examples": ["1 is 1"]}, "a message is '1 is 1'"),
    ("bfcl", {"category": "memory"}, "expected one of base"), ("coding", {"tries": 0}, "tries=0")])
def test_refused(folder, name, options, match):
    with pytest.raises(UserError, match=match):
        load_task(name, options, folder)


# If this fails, a model whose template knows no calls is asked for some.
def test_no_calls_without_a_format(tmp_path, questions):
    plain, sandbox = chat_folder.save(tmp_path, "forgetful"), Pool(Limits(), 1, 1, 0, [])
    with pytest.raises(UserError, match="tool_parser"):
        load_task("math_python", {"prompts": questions}, plain, sandbox)
    load_task("math_python", {"prompts": questions}, plain)  # as the learner does, without SGLang
    load_task("math_python", {"prompts": questions, "tools": "blocks"}, plain)


# If this fails, an episode that is cut off or played to its end leaves its session behind, or its trajectory is not
# what was sampled and shown; or a controller that starts again does not go on where the episode was.
@pytest.mark.parametrize("turns, status", [(8, Status.COMPLETED), (1, Status.TRUNCATED)])
def test_episode_with_code(folder, questions, turns, status):
    async def play():
        async with Pool(Limits(seconds=20), sessions=1, cells=1, warm=0, modules=MATHS) as sandbox:
            task = load_task("math_python", {"prompts": questions, "tools": "blocks"}, folder, sandbox)
            decode, prompt = task.template.tokenizer.decode, task.prompt(0)

            def answers(ids):
                shown = decode(ids).rpartition("```output\n")
                text = f"\\boxed{{{shown[2].split()[0]}}}" if shown[1] else f"```python\n{prompt.data[0][8:-1]}\n```"
                return task.template.encode(text) + task.stop_token_ids[:1]
            settings = EpisodeSettings(**vars(SETTINGS) | {"limits": LimitsSection(turns=turns), "max_tokens": 4000,
                                                           "max_new_tokens": 100})
            diary, engine = Diary([], [], 0), FakeEngine(answers)
            played = await run_episode(FakeEngine(answers), task, prompt, settings, 0, diary)
            kept = [turn for _, _, turn in diary._pending[:1]]
            again = await run_episode(engine, task, prompt, settings, 0, Diary(kept, [], 0))
            assert again.tokens.tolist() == played.tokens.tolist() and len(engine.requests) == played.info["turns"] - 1
            assert sandbox.open_sessions == 0 and task.replayable
            return played, decode(played.tokens)
    played, text = asyncio.run(play())
    assert (played.status, played.info["solved"]) == (status, status is Status.COMPLETED)
    assert played.rewards.sum() == float(status is Status.COMPLETED) and played.info["calls"] == 1
    assert text.count("```python") == 2 and text.count("```output") == 1  # one of each two is the system prompt's


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
         "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0, "tie_word_embeddings": False}


# If one fails, a recipe of ours is refused: its task, its prompts, its sandbox.
@pytest.mark.parametrize("recipe", ["math-python-smollm2-cpu", "bfcl-smollm2-cpu", "agent-arithmetic-cpu"])
def test_recipes_can_start(tmp_path, monkeypatch, recipe):
    from transformers import LlamaConfig, LlamaForCausalLM
    model = chat_folder.save(tmp_path / "model", "forgetful")
    (model / "config.json").write_text(json.dumps(LLAMA))
    LlamaForCausalLM(LlamaConfig.from_pretrained(model)).save_pretrained(model)
    monkeypatch.chdir(ROOT)
    config = run_config.load(f"configs/{recipe}.yaml", [f"model.path={model}", f"runs_dir={tmp_path}"])
    folder = RunFolder(config.run_dir)
    folder.path.mkdir()
    launcher.prepare(config, folder)
    assert folder.config_path.is_file()
