"""Tasks: the guessing game's rules and demonstrations, reasoning-gym's scoring, and refused options."""
import asyncio
import math

import numpy as np
import pytest

from sao_megatron.errors import UserError
from sao_megatron.rollout.tasks import load_task
from sao_megatron.rollout.tasks.base import Prompt
from sao_megatron.rollout.tasks.guess_number import BOS, EOT, HIGHER, LOWER, WIN, GuessNumber


def play(task: GuessNumber, secret: int, *actions: list[int]) -> list:
    async def game():
        environment = task.environment(Prompt("test", secret))
        assert await environment.reset() == [BOS]
        return [await environment.step(action) for action in actions]
    return asyncio.run(game())


def test_hints_lead_to_the_secret():
    """Fails if a hint points the wrong way or finding the secret is not rewarded: the task would be unlearnable."""
    task = GuessNumber()
    higher, lower, win = play(task, 6, [task.token(4), EOT], [task.token(7), EOT], [task.token(6), EOT])
    assert [step.observation for step in (higher, lower, win)] == [[HIGHER], [LOWER], [WIN]]
    assert [(step.reward, step.done) for step in (higher, lower, win)] == [(0, False), (0, False), (1, True)]
    assert win.info == {"solved": True, "malformed": False}


def test_four_wrong_guesses_end_the_game_unsolved():
    """Fails if the game outlasts its turns or a loss counts as solved."""
    task = GuessNumber()
    steps = play(task, 6, *[[task.token(1), EOT]] * 4)
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].reward == 0 and steps[-1].info["solved"] is False


@pytest.mark.parametrize("action", [[EOT], [3, EOT], [21, EOT], [6, 6], [6]])
def test_malformed_action_ends_the_game(action):
    """Fails if something that is not a guess is answered like one."""
    [step] = play(GuessNumber(malformed_reward=-0.2), 1, action)
    assert (step.done, step.reward, step.observation) == (True, -0.2, [])
    assert step.info == {"solved": False, "malformed": True}


def test_one_token_actions():
    """Fails if the variant whose action is the number alone waits for an end-of-turn token."""
    task = GuessNumber(action="number")
    assert (task.max_new_tokens, task.stop_token_ids) == (1, [])
    [step] = play(task, 3, [task.token(3)])
    assert step.info["solved"]


def test_prompts_are_deterministic_and_cover_every_secret():
    """Fails if a restart trains on other prompts, or the evaluation set leaves secrets out."""
    task, same, other = GuessNumber(seed=1), GuessNumber(seed=1), GuessNumber(seed=2)
    stream = [task.prompt(index) for index in range(200)]
    assert stream == [same.prompt(index) for index in range(200)]
    assert stream != [other.prompt(index) for index in range(200)]
    assert {prompt.data for prompt in stream} == set(range(1, 16))
    assert [prompt.data for prompt in task.evaluation_prompts(17)] == [*range(1, 16), 1, 2]


@pytest.mark.parametrize("learn_hints", [True, False])
def test_demonstrations_are_valid_random_play(learn_hints):
    """Fails if the warm-up teaches a strategy, wrong hints, or the wrong tokens."""
    task = GuessNumber(learn_hints=learn_hints)
    demonstrations = list(task.demonstrations(600, seed=3))
    guesses = np.concatenate([demo.tokens[demo.tokens > WIN] for demo in demonstrations]) - task.token(0)
    assert np.bincount(guesses, minlength=16)[1:].min() > 0.7 * len(guesses) / 15
    assert abs(np.mean([demo.info["solved"] for demo in demonstrations]) - (1 - (14 / 15) ** 4)) < 0.06
    for demo in demonstrations[:50]:
        is_hint = (demo.tokens >= HIGHER) & (demo.tokens <= WIN)
        assert (demo.action_mask == ((demo.tokens != BOS) & (~is_hint | learn_hints))).all()
        assert demo.rollout_logprobs[demo.tokens > WIN] == pytest.approx(-math.log(15))
        assert demo.reward == float(demo.info["solved"])
        secret = int(demo.prompt_id.rpartition("/")[2])
        hints = [task.verdict(token - task.token(0), secret) for token in demo.tokens[demo.tokens > WIN].tolist()]
        assert demo.tokens[is_hint].tolist() == hints
    again = next(iter(task.demonstrations(1, seed=3)))
    assert again.tokens.tolist() == demonstrations[0].tokens.tolist()


def test_saved_tokenizer_reads_a_game_aloud(tmp_path):
    """Fails if exported checkpoints carry a tokenizer that names the ids wrongly or does not load."""
    from transformers import AutoTokenizer
    task = GuessNumber()
    task.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = [BOS, task.token(8), EOT, HIGHER, task.token(15), EOT, WIN]
    assert tokenizer.decode(ids) == "<bos> 8 <eot> higher 15 <eot> win"
    assert tokenizer("higher 15 <eot>")["input_ids"] == [HIGHER, task.token(15), EOT]
    assert len(tokenizer) == task.vocab_size == 32


@pytest.mark.parametrize("name, options, message", [
    ("guess", {}, "unknown task 'guess': known are guess_number, levers, mixture, reasoning_gym"),
    ("guess_number", {"hihg": 3}, "no option 'hihg': its options are low, high"),
    ("guess_number", {"high": 99}, "high=99"),
    ("guess_number", {"action": "text"}, "action='text'"),
    ("guess_number", {"high": "ten"}, "high"),
    ("guess_number", {"model_dir": "x"}, "no option 'model_dir'"),
    ("reasoning_gym", {}, "needs the option 'family'"),
    ("absent.py:Game", {}, "absent.py does not exist"),
])
def test_bad_tasks_are_refused_with_the_reason(name, options, message):
    """Fails if a wrong task reaches a running job, or the message does not name what to change."""
    with pytest.raises(UserError, match=message):
        load_task(name, options, model_dir=None)


def test_task_from_a_file(tmp_path):
    """Fails if users could not bring their own task, or a wrong class name is not explained."""
    path = tmp_path / "my_game.py"
    path.write_text("class Game:\n"
                    "    def __init__(self, model_dir, rounds=2):\n"
                    "        self.given = (model_dir, rounds)\n")
    assert load_task(f"{path}:Game", {"rounds": 5}, "folder").given == ("folder", 5)
    with pytest.raises(UserError, match="no class 'Gmae': its classes are Game"):
        load_task(f"{path}:Gmae", {}, None)
    path.write_text("import does_not_exist")
    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
        load_task(f"{path}:Game", {}, None)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """A byte-level BPE tokenizer without merges, with an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def answer(task, prompt, text: str, ended: bool = True):
    action = task.tokenizer(text)["input_ids"] + task.stop_token_ids * ended
    return asyncio.run(task.environment(prompt).step(action))


def test_reasoning_gym_scores_the_stored_answer(byte_tokenizer):
    """Fails if a right answer is not rewarded, a wrong one is, or a cut-off one counts as given."""
    options = {"family": "chain_sum", "size": 20, "min_terms": 2, "max_terms": 2}
    task = load_task("reasoning_gym", options, byte_tokenizer)
    prompt = task.prompt(3)
    assert task.tokenizer.decode(asyncio.run(task.environment(prompt).reset())) == prompt.data["question"] + "\n"
    right = prompt.data["answer"]
    for text in (right, f" {right}\n", f"so <answer>{right}</answer>."):
        step = answer(task, prompt, text)
        assert (step.reward, step.done, step.info["solved"]) == (1.0, True, True)
    assert answer(task, prompt, "no idea").info["solved"] is False
    assert answer(task, prompt, right, ended=False).done is False


def test_reasoning_gym_prompts_are_stable_and_evaluation_is_apart(byte_tokenizer):
    """Fails if training sees evaluation questions, or a prompt id names different questions in two runs."""
    task, same = (load_task("reasoning_gym", {"family": "chain_sum", "size": 20}, byte_tokenizer) for _ in range(2))
    training = [task.prompt(index) for index in range(20)]
    assert [prompt.id for prompt in training] == [same.prompt(index + 20).id for index in range(20)]
    assert task.prompt(4).data["question"] == same.prompt(24).data["question"]
    assert not {p.id for p in training} & {p.id for p in task.evaluation_prompts(30)}


def test_reasoning_gym_prompt_uses_the_chat_template(byte_tokenizer):
    """Fails if a chat model is asked outside its format."""
    task = load_task("reasoning_gym", {"family": "chain_sum", "size": 5}, byte_tokenizer)
    task.tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    prompt = task.prompt(0)
    tokens = asyncio.run(task.environment(prompt).reset())
    assert task.tokenizer.decode(tokens) == f"[user]{prompt.data['question']}[assistant]"


@pytest.mark.parametrize("options, message", [({"family": "chain_smu"}, "chain_smu"),
                                              ({"family": "chain_sum", "terms": 2}, "terms"),
                                              ({"family": "chain_sum", "min_terms": -1}, "min_terms")])
def test_reasoning_gym_options_are_refused_by_name(byte_tokenizer, options, message):
    """Fails if a misspelt family or option is only found in a running job."""
    with pytest.raises(UserError, match=message):
        load_task("reasoning_gym", options, byte_tokenizer)


def test_reasoning_gym_few_shot_prompt(byte_tokenizer):
    """Fails if a base model gets no examples, an example is a question, or an answer runs on past its line."""
    options = {"family": "chain_sum", "size": 20, "min_terms": 2, "max_terms": 2, "shots": 3}
    task = load_task("reasoning_gym", options, byte_tokenizer)
    prompt = task.prompt(3)
    text = task.tokenizer.decode(asyncio.run(task.environment(prompt).reset()))
    *examples, question = text.split("\n")
    assert question == prompt.data["question"] and len(examples) == 3
    questions = {p.data["question"] for p in (*map(task.prompt, range(20)), *task.evaluation_prompts(20))}
    for example in examples:
        assert not any(example.startswith(known) for known in questions)
    newline = task.tokenizer.encode("\n")[-1]
    assert newline in task.stop_token_ids
    step = asyncio.run(task.environment(prompt).step(task.tokenizer(" " + prompt.data["answer"] + "\n")["input_ids"]))
    assert (step.reward, step.done) == (1.0, True)
