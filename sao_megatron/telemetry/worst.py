"""TensorBoard's text `worst`: the token strings that were dropped most in the last steps, and the trajectories that
lost most tokens, each token with its fate.

The text page of TensorBoard keeps bold, italics, headings, links and their titles, and strips every style and colour
(tensorboard.plugin_util). So a fate is a sign beside a bold token, its numbers are the title that the pointer shows,
and it is a link to the trajectory's page, which has a colour.
"""
from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from sao_megatron.telemetry.records import Recorded, Words

MOST = 8
"""Trajectories shown."""
MOST_TOKENS = 400
"""Tokens shown of each."""
CONTEXT = 12
"""Tokens shown before and after one that was not simply kept."""
MOST_WORDS = 10
"""Token strings shown."""
PORT = 6106
"""Of `sao-megatron inspect --serve`."""
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

    def __init__(self, words: Words, run_dir: Path, page: str | None = None):
        """`page`: address of a page of the run that somebody serves; else links lead to `inspect --serve`."""
        self._words, self._run_dir, self._page = words, run_dir, page
        self._begin()

    def _begin(self) -> None:
        self._entries: list[_Entry] = []
        self._sampled, self._low, self._high = Counter(), Counter(), Counter()
        """Action tokens of the seeded sample by id: all, dropped low, dropped high."""

    def add(self, step: int, recorded: list[Recorded]) -> None:
        for one in recorded:
            if "fate" not in one.results:
                continue
            if share := _dropped(one).mean():
                self._entries.append(_Entry(float(share), step, one))
            if one.chosen == "sample":
                ids, fate = one.trajectory.tokens[one.trajectory.action_mask], one.results["fate"]
                for counts, chosen in ((self._sampled, ids), (self._low, ids[fate == "dropped_low"]),
                                       (self._high, ids[fate == "dropped_high"])):
                    counts.update(chosen.tolist())
        self._entries.sort(key=lambda entry: (-entry.dropped, -entry.step))
        del self._entries[MOST:]

    def take(self) -> str | None:
        """The text, in the part of HTML that TensorBoard keeps, and begin anew; None where nothing was dropped."""
        if not self._entries:
            self._begin()
            return None
        command = "" if self._page else (
            f"<p>Links open while <code>sao-megatron inspect {html.escape(str(self._run_dir))} --serve</code> runs on "
            f"the machine of your browser, or on one whose port {PORT} is forwarded to it.</p>")
        text = "".join([_LEGEND, command, self._most_dropped(), *map(self._shown, self._entries)])
        self._begin()
        return text

    def _most_dropped(self) -> str:
        """Token strings of the seeded sample."""
        most = (self._low + self._high).most_common(MOST_WORDS)
        words = self._words.of(np.array([id for id, _ in most], np.int64))
        shown = [html.escape(repr(word), quote=False) if word else str(id)
                 for (id, _), word in zip(most, words, strict=True)]
        items = [f"<strong>{word}</strong> {count} of {self._sampled[id]} (▼{self._low[id]} ▲{self._high[id]})"
                 for (id, count), word in zip(most, shown, strict=True)]
        return f"<p>most dropped tokens of the sample: {', '.join(items) or 'none'}</p>"

    def _shown(self, entry: _Entry) -> str:
        t = entry.recorded.trajectory
        title = (f"step {entry.step}: {entry.dropped:.0%} of {t.num_actions} action tokens dropped, reward "
                 f"{t.reward:g}, {t.task} {t.prompt_id}")
        page = self._page or f"http://localhost:{PORT}/{quote(self._run_dir.name)}/{entry.step}"
        address = f"{html.escape(page)}#{t.id}"
        return (f'<h4>{html.escape(title)}</h4><p><a href="{address}">{t.id[:12]}</a></p>'
                f"<p>{self._tokens(entry.recorded, address)}</p>")

    def _tokens(self, recorded: Recorded, address: str) -> str:
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
            parts.append(_token(word or str(t.tokens[place]), fates[place], titles.get(place, ""), address))
        if len(t) > before + 1:
            parts.append(f"[{len(t) - before - 1} tokens]")
        return "\u2009".join(parts)  # thin spaces, since not every tokenizer's strings have their own


def _token(word: str, fate: str, title: str, address: str) -> str:
    text = re.sub(r" (?= )", "\u00a0", html.escape(word)).replace("\n", "↵<br>")
    if fate in SIGNS:
        return f'<strong><a title="{html.escape(title)}" href="{address}">{SIGNS[fate]}{text}</a></strong>'
    return text if fate else f"<em>{text}</em>"


def _dropped(recorded: Recorded) -> np.ndarray:
    return np.isin(recorded.results["fate"], ("dropped_low", "dropped_high"))


def _places(marked: np.ndarray) -> np.ndarray:
    """Positions that are shown: those within CONTEXT of a marked one, at most MOST_TOKENS."""
    near = np.convolve(marked, np.ones(2 * CONTEXT + 1))[CONTEXT:CONTEXT + len(marked)] > 0.5
    return np.flatnonzero(near)[:MOST_TOKENS]
