"""TensorBoard's text of the worst trajectories, through TensorBoard's own sanitiser."""
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from tensorboard.plugin_util import markdown_to_safe_html

from sao_megatron.telemetry.records import Recorded, Words
from sao_megatron.telemetry.worst import CONTEXT, MOST, PORT, Worst
from sao_megatron.trajectory.types import TrajectoryBuilder


class Letters(Words):
    """Token 65 is "A"; some are what HTML or Markdown would take for their own."""

    def _word(self, id: int) -> str:
        return {1: "<b>", 2: "*", 3: "\n", 4: "a  b"}.get(id, chr(id))


def record(tokens: list[int], fates: list[str], prompt=(65, 66)) -> Recorded:
    builder = TrajectoryBuilder(list(prompt), "p<1>", "maths")
    builder.add_action(tokens, [-1.0] * len(tokens), [3] * len(tokens))
    builder.add_reward(0.5)
    n = len(tokens)
    return Recorded(builder.build(), "worst", {"fate": np.array(fates), "log_ratio": np.full(n, -0.51),
                                               "advantage": np.full(n, 0.25)})


def shown(worst: Worst) -> str:
    return markdown_to_safe_html(worst.take())


# If this fails, TensorBoard shows tokens without their fates, or tokens of the text as its own mark-up.
def test_what_tensorboard_keeps():
    worst = Worst(Letters("none"), Path("runs/first"), page="https://host/first.html")
    one = record([1, 2, 67, 3, 4], ["dropped_low", "dropped_high", "recovered", "kept", "kept"])
    worst.add(7, [one])
    html = shown(worst)
    link = rf'<a title="log r -0.51, advantage 0.25, version 3" href="https://host/first.html#{one.trajectory.id}">'
    for sign, word in (("▼", "&lt;b&gt;"), ("▲", r"\*"), ("◆", "C")):
        assert re.search(rf"<strong>{link}{sign}{word}</a></strong>", html), html
    assert "<em>A</em>\u2009<em>B</em>" in html and "a\u00a0 b" in html and "↵<br>" in html
    assert "step 7: 40% of 5 action tokens dropped, reward 0.5, maths p&lt;1&gt;" in html


# If this fails, what is shown is not the worst, or a trajectory of 100,000 tokens fills the page.
def test_the_worst_of_the_last_steps_in_excerpts():
    worst = Worst(Letters("none"), Path("runs/my first"))
    for step in range(2 * MOST):
        dropped = ["dropped_low"] * (step + 1) + ["kept"] * 50_000
        worst.add(step, [record([67] * len(dropped), dropped), record([67], ["kept"])])
    html = shown(worst)
    assert re.findall(r"step (\d+):", html) == [str(step) for step in range(2 * MOST - 1, MOST - 1, -1)]
    assert f"[{50_000 - CONTEXT} tokens]" in html and len(html) < 40_000
    assert worst.take() is None, "each text is about new steps"


# If this fails, links of TensorBoard's lead nowhere unless a recipe says where, or to a page without the trajectory.
def test_links_lead_to_the_page_of_the_step():
    worst = Worst(Letters("none"), Path("runs/my first"))
    one = record([67], ["dropped_low"])
    worst.add(12, [one])
    html = shown(worst)
    assert html.count(f'href="http://localhost:{PORT}/my%20first/12#{one.trajectory.id}"') == 2
    assert "sao-megatron inspect runs/my first --serve" in html and f"port {PORT}" in html


# If this fails, the strings that are said to be dropped most are not those of the fair sample.
def test_most_dropped_tokens():
    worst = Worst(Letters("none"), Path("runs/first"))
    for chosen, times in (("sample", 2), ("worst", 5)):
        low, high = ["dropped_low"] * 3 + ["kept"], ["dropped_high", "kept", "kept", "kept"]
        for fates in [low, high] * times:
            worst.add(0, [replace(record([67, 67, 68, 1], fates), chosen=chosen)])
    assert "sample: <strong>'C'</strong> 6 of 8 (▼4 ▲2), <strong>'D'</strong> 2 of 4 (▼2 ▲0)</p>" in shown(worst)
