"""TensorBoard's text `worst`: the trajectories of the last steps that lost most tokens, each token with its fate.

The text page of TensorBoard keeps bold, italics, headings, links and their titles, and strips every style and colour
(tensorboard.plugin_util). So a fate is a sign beside a bold token, its numbers are the title that the pointer shows,
and with the address of the page that `inspect --html` writes it is a link there, which has a colour.
"""
from __future__ import annotations

import html
import re
from dataclasses import dataclass

import numpy as np

from sao_megatron.telemetry.records import Recorded, Words

MOST = 8
"""Trajectories shown."""
MOST_TOKENS = 400
"""Tokens shown of each."""
CONTEXT = 12
"""Tokens shown before and after one that was not simply kept."""
SIGNS = {"dropped_low": "▼", "dropped_high": "▲", "recovered": "◆"}
_LEGEND = ("<p><strong>▼bold</strong> dropped low (the policy has moved away) · <strong>▲bold</strong> dropped high · "
           "<strong>◆bold</strong> recovered · plain: sampled and kept · <em>italic</em>: prompt and observations · "
           "point at a bold token for its numbers</p>")


@dataclass(frozen=True)
class _Entry:
    dropped: float
    step: int
    recorded: Recorded


class Worst:
    """`add` every step's records; `take` what they came to."""

    def __init__(self, words: Words, page: str | None = None):
        """`page`: address of the page that `sao-megatron inspect --html` wrote."""
        self._words, self._page = words, page
        self._entries: list[_Entry] = []

    def add(self, step: int, recorded: list[Recorded]) -> None:
        for one in recorded:
            if "fate" in one.results and (share := _dropped(one).mean()):
                self._entries.append(_Entry(float(share), step, one))
        self._entries.sort(key=lambda entry: (-entry.dropped, -entry.step))
        del self._entries[MOST:]

    def take(self) -> str | None:
        """The text, in the part of HTML that TensorBoard keeps, and begin anew; None where nothing was dropped."""
        entries, self._entries = self._entries, []
        return "".join([_LEGEND, *map(self._shown, entries)]) if entries else None

    def _shown(self, entry: _Entry) -> str:
        t = entry.recorded.trajectory
        title = (f"step {entry.step}: {entry.dropped:.0%} of {t.num_actions} action tokens dropped, reward "
                 f"{t.reward:g}, {t.task} {t.prompt_id}")
        link = self._link("", t.id, t.id[:12]) if self._page else f"#{t.id}"
        return f"<h4>{html.escape(title)}</h4><p>{link}</p><p>{self._tokens(entry.recorded)}</p>"

    def _tokens(self, recorded: Recorded) -> str:
        t, fates, titles = recorded.trajectory, np.full(len(recorded.trajectory), "", object), {}
        actions = np.flatnonzero(t.action_mask)
        fates[actions] = recorded.results["fate"]
        for number, place in enumerate(actions):
            if fates[place] in SIGNS:
                titles[place] = ", ".join(
                    f"{label} {recorded.results[name][number]:.3g}" for name, label in
                    (("log_ratio", "log r"), ("advantage", "advantage"), ("entropy", "entropy"))
                    if name in recorded.results) + f", version {t.versions[place]}"
        places = _places(np.isin(fates, list(SIGNS)))
        words, parts, before = self._words.of(t.tokens[places]), [], -1
        for place, word in zip(places.tolist(), words, strict=True):
            if place > before + 1:
                parts.append(f"[{place - before - 1} tokens]")
            before = place
            parts.append(self._token(word or str(t.tokens[place]), fates[place], titles.get(place, ""), t.id))
        if len(t) > before + 1:
            parts.append(f"[{len(t) - before - 1} tokens]")
        return "\u2009".join(parts)  # thin spaces, since not every tokenizer's strings have their own

    def _token(self, word: str, fate: str, title: str, trajectory: str) -> str:
        text = re.sub(r" (?= )", "\u00a0", html.escape(word)).replace("\n", "↵<br>")
        if fate in SIGNS:
            return f"<strong>{self._link(title, trajectory, SIGNS[fate] + text)}</strong>"
        return text if fate else f"<em>{text}</em>"

    def _link(self, title: str, trajectory: str, text: str) -> str:
        address = f' href="{html.escape(self._page)}#{trajectory}"' if self._page else ""
        return f'<a title="{html.escape(title)}"{address}>{text}</a>'


def _dropped(recorded: Recorded) -> np.ndarray:
    return np.isin(recorded.results["fate"], ("dropped_low", "dropped_high"))


def _places(marked: np.ndarray) -> np.ndarray:
    """Positions that are shown: those within CONTEXT of a marked one, at most MOST_TOKENS."""
    near = np.convolve(marked, np.ones(2 * CONTEXT + 1))[CONTEXT:CONTEXT + len(marked)] > 0.5
    return np.flatnonzero(near)[:MOST_TOKENS]
