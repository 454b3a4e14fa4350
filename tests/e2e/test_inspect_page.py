"""The page of `inspect --html` in headless Chromium, with 5,000 synthetic trajectories."""
from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from chromium import EXECUTABLE, NAMES, Chromium
from synthetic_run import make_run

from sao_megatron import cli
from sao_megatron.telemetry.inspect import data
from sao_megatron.telemetry.records import files_of

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason=f"none of {', '.join(NAMES)} is on PATH")

STEPS, PER_STEP = 100, 50
NUMBERS = {"advantage": "advantage", "value": "value", "return": "return", "reward": "reward", "weight": "weight",
           "ratio r": "ratio", "log ratio": "log_ratio", "log p policy": "policy_logprob", "entropy, nats": "entropy",
           "expert load": "expert_load", "log p rollout": "rollout_logprob", "token id": "token_id",
           "version": "version", "lag": "lag", "position": "position"}
"""What a token's panel calls the columns of the records."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "large", STEPS, PER_STEP)


@pytest.fixture(scope="module")
def url(run):
    page = run.path / "page.html"
    assert cli.main(["inspect", str(run.path), "--html", str(page)]) == 0
    return page.as_uri()


@pytest.fixture
async def browser(url, tmp_path):
    """The page, opened; fails if it threw or logged an error by the end of the test."""
    async with Chromium(tmp_path / "profile") as browser:
        await browser.prefer("light")
        await browser.open(url)
        await browser.until("document.getElementById('loading') === null")
        yield browser
        assert browser.errors == []


async def shown(browser) -> list[str]:
    """Prompts of the rows that are in the list now, from the top."""
    return await browser.evaluate("[...document.querySelectorAll('.row .prompt')].map((row) => row.textContent)")


async def fill(browser, **fields: str) -> str:
    """Type into filters and sorting; returns the count above the list."""
    for name, value in fields.items():
        field = f"document.getElementById('f-{name.replace('_', '-')}')"
        await browser.evaluate(f"{field}.value = {json.dumps(value)}")
        await browser.evaluate(f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    return await browser.evaluate("document.getElementById('count').textContent")


# If this fails, the page is empty, draws no charts, or asks the network for something.
async def test_overview(browser):
    titles = await browser.evaluate("[...document.querySelectorAll('figcaption strong')].map((one) => one.textContent)")
    for title in ("Reward", "Dropped by the gate", "Effective sample size", "Lag", "Dropped by lag", "Ratio"):
        assert title in titles
    assert await browser.evaluate("[...document.querySelectorAll('path.line')].every((one) => !one.getAttribute('d')"
                                  ".includes('NaN') && one.getAttribute('d').length > 100)")
    assert await browser.evaluate("performance.getEntriesByType('resource').length") == 0
    await browser.evaluate("document.querySelector('#step-charts svg').dispatchEvent(new MouseEvent('click', "
                           "{clientX: document.querySelector('#step-charts svg').getBoundingClientRect().right}))")
    assert await browser.evaluate("document.getElementById('count').textContent") == "50 of 5,000 trajectories"


# If this fails, a filter shows what it should hide, or the list makes 5,000 rows at once.
async def test_filters_and_sorting(browser, run):
    each = data.per_trajectory(data.load(run.path, (0, STEPS)))
    await browser.press("t")
    assert await fill(browser) == "5,000 of 5,000 trajectories"
    assert await browser.evaluate("document.querySelectorAll('.row').length") < 60
    prompts, dropped, step = np.array(each["prompt"]), each["dropped"], each["step"]

    def counted(chosen) -> str:
        assert 0 < chosen.sum() < 5000
        return f"{chosen.sum():,} of 5,000 trajectories"
    worst_first = np.lexsort((np.arange(5000), -dropped))
    await browser.evaluate("document.getElementById('f-order').click()")
    await fill(browser, sort="dropped")
    assert (await shown(browser))[:5] == prompts[worst_first][:5].tolist()
    chosen = (step >= 10) & (step <= 19)
    assert await fill(browser, step_min="10", step_max="19") == counted(chosen)
    chosen &= 100 * dropped >= 10
    assert await fill(browser, dropped_min="10") == counted(chosen)
    chosen &= each["reward"] == 1
    assert await fill(browser, reward_min="1") == counted(chosen)
    chosen &= np.array(each["task"]) == "divisible"
    assert await fill(browser, task="divisible") == counted(chosen)
    chosen &= each["lag_max"] >= 3
    assert await fill(browser, lag_min="3") == counted(chosen)
    await browser.evaluate("document.getElementById('f-reset').click()")
    assert await fill(browser, text="FROM 1 TO 20 ARE") == counted(np.char.find(prompts.astype(str), "/20-") >= 0)
    assert await fill(browser, text="no such text") == "0 of 5,000 trajectories"


# If this fails, the page cannot be used without a mouse.
async def test_keyboard(browser, run):
    each = data.per_trajectory(data.load(run.path, (0, STEPS)))
    ids, hash = each["trajectory"], "location.hash.slice(1)"
    current = "Number(document.activeElement.dataset.token)"
    await browser.press("j")
    assert await browser.evaluate(hash) == ids[0]
    await browser.press("j", "j", "k")
    assert await browser.evaluate(hash) == ids[1]
    await browser.press("ArrowRight", "ArrowRight", "ArrowLeft")
    first_action = await browser.evaluate("document.querySelector('.segment.action .token').id")
    assert await browser.evaluate(current) == int(first_action.removeprefix("token-")) + 1
    await browser.press("/")
    assert await browser.evaluate("document.activeElement.id") == "f-text"
    await browser.press("j")
    assert await browser.evaluate("document.activeElement.value") == "j"
    await browser.press("Escape", "?")
    assert await browser.evaluate("document.getElementById('help').open")
    await browser.press("Escape")
    await browser.until("!document.getElementById('help').open")  # which the browser does when it likes
    await browser.press("o")
    assert await browser.evaluate("document.getElementById('reader').hidden")


# If this fails, a number beside a token is not the one that was recorded for it.
async def test_numbers_of_a_token(browser, run):
    rows = pq.read_table(files_of(run.tokens_dir)[3]).to_pylist()
    (id, *_) = [row["trajectory"] for row in rows if row["fate"] == "dropped_high"]
    mine = [row for row in rows if row["trajectory"] == id]
    await fill(browser, text=id)
    await browser.press("j", "n")
    tokens = await browser.evaluate("[...document.querySelectorAll('.text .token')].map((one) => one.textContent)")
    assert [token.replace("⏎\n", "\n") for token in tokens] == [row["token"] for row in mine]
    seams = await browser.evaluate("[...document.querySelectorAll('#turns .seam')].map((one) => one.dataset.version)")
    versions = [row["version"] for row in mine if row["version"] is not None]
    assert seams == [f"v{new}" for old, new in zip([None, *versions], versions, strict=False) if old != new]
    dropped = next(row for row in mine if row["fate"] not in (None, "kept"))
    assert await browser.evaluate("document.activeElement.className") == f"token {dropped['fate']} current"
    await compare(browser, dropped)
    observation = next(row for row in mine if row["kind"] != "action")
    place = await browser.evaluate(f"(() => {{ const box = document.querySelectorAll('.text .token')"
                                   f"[{observation['position']}].getBoundingClientRect(); return [box.x, box.y] }})()")
    await browser.point(place[0] + 3, place[1] + 8)
    await browser.until(f"document.querySelector('#numbers dd').textContent === '{observation['token_id']}'")
    await compare(browser, observation)


async def compare(browser, row: dict) -> None:
    found = dict(await browser.evaluate("[...document.querySelectorAll('#numbers dd')]"
                                        ".map((one) => [one.dataset.name, one.textContent])"))
    for name, column in NUMBERS.items():
        text = found[name].replace("−", "-").replace(",", "").split(" ")[0]
        expected = row[column]
        if expected is None:
            assert text == "–", name
        else:
            assert float(text) == pytest.approx(expected, rel=6e-4, abs=1e-9), name
    assert found["fate"] == (row["fate"] or "–").replace("_", " ")
    assert (found["kind"], found["turn"]) == (row["kind"], str(row["turn"] + 1))


# If this fails, the page is white in a dark room, or its button does nothing.
async def test_light_and_dark(browser):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = await browser.evaluate(colour)
    await browser.press("d")
    dark = await browser.evaluate(colour)
    assert dark != light
    await browser.press("d")
    assert await browser.evaluate(colour) == light
    await browser.evaluate("delete document.documentElement.dataset.theme")
    await browser.prefer("dark")
    assert await browser.evaluate(colour) == dark
