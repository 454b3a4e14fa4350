"""The in-process sampler of the fixed-lag experiments is held to the real engine, on the same weights."""
from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
from ranks import World
from served import VOCAB

HERE = Path(__file__).parent
DRAWS = 2000


async def test_sampler_and_engine_are_one_distribution(engine, tmp_path):
    """If this fails, tools/sweep.py trains on samples that SGLang would not have drawn, or with other log-probs."""
    engine.model.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 2, 5, 9, 14, 30)]
    drawn, stops = prompts[2], [3, 4, 5, 6, 7, 8]
    async with engine.client() as client:
        theirs = await asyncio.gather(*(client.generate(
            prompt, max_new_tokens=12, temperature=1.0, stop_token_ids=[]) for prompt in prompts))
        requests = ([(prompt, 12, 1.0, stops) for prompt in prompts] + [(drawn, 1, 1.0, [])] * DRAWS
                    + [(drawn, 1, 0.5, [])] * 60)
        (tmp_path / "order.json").write_text(json.dumps(dict(
            requests=requests, score=[prompt + answer.tokens for prompt, answer in zip(prompts, theirs, strict=True)])))
        with World(HERE / "sampler_worker.py", 1, (str(tmp_path),), tmp_path / "log") as worker:
            await asyncio.to_thread(worker.wait, 120)
        result = json.loads((tmp_path / "result.json").read_text())
        for prompt, answer, scores in zip(prompts, theirs, result["scores"], strict=True):
            np.testing.assert_allclose(scores[len(prompt) - 1:], answer.logprobs, atol=1e-4)
        ours = result["answers"][:len(prompts)]
        for prompt, answer in zip(prompts, ours, strict=True):
            scores = await client.score(prompt + answer["tokens"])
            np.testing.assert_allclose(answer["logprobs"], scores[-len(answer["tokens"]):], atol=1e-4)
        sharper = await asyncio.gather(*(client.generate(
            drawn, max_new_tokens=1, temperature=0.5, stop_token_ids=[]) for _ in range(12)))
    for answer in ours:
        assert answer["versions"] == [5] * len(answer["tokens"])
        assert not set(answer["tokens"][:-1]) & set(stops)
        assert answer["finish"] == "stop" if answer["tokens"][-1] in stops else len(answer["tokens"]) == 12
    _check_frequencies(result["answers"][len(prompts):-60])
    at_half = {answer["tokens"][0]: answer["logprobs"][0] for answer in result["answers"][-60:]}
    both = [(at_half[a.tokens[0]], a.logprobs[0]) for a in sharper if a.tokens[0] in at_half]
    assert both, "two samples of one distribution have no token in common"
    np.testing.assert_allclose(*zip(*both, strict=True), atol=1e-4)


def _check_frequencies(answers: list[dict]) -> None:
    """Pearson's statistic of the drawn tokens against their log-probs lies within six standard deviations."""
    counts = Counter(answer["tokens"][0] for answer in answers)
    probability = {answer["tokens"][0]: np.exp(answer["logprobs"][0]) for answer in answers}
    common = {token: p for token, p in probability.items() if p * DRAWS >= 5}
    rest = 1 - sum(common.values())
    statistic = sum((counts[token] - p * DRAWS) ** 2 / (p * DRAWS) for token, p in common.items())
    others = DRAWS - sum(counts[token] for token in common)
    statistic += (others - rest * DRAWS) ** 2 / (rest * DRAWS)
    assert abs(statistic - len(common)) < 6 * (2 * len(common)) ** 0.5, (statistic, len(common))
