"""`sao-megatron inspect`: what the token records of a run say, in the terminal and as one page. Needs no torch."""
from __future__ import annotations

import re
from pathlib import Path

from sao_megatron.errors import UserError
from sao_megatron.telemetry.inspect.data import load


def inspect(run_dir: Path, html: Path | None = None, compare: Path | None = None, step: str | None = None) -> None:
    """Print the report of a run (beside that of `compare`), or write the page to `html`; steps `step` = "A:B" only.

    Raises UserError where a folder holds no records, or none of those steps.
    """
    steps = _range(step)
    run, other = load(run_dir, steps), load(compare, steps) if compare else None
    if html is None:
        from sao_megatron.telemetry.inspect.terminal import report
        report(run, other)
        return
    if not html.parent.is_dir():
        raise UserError(f"--html {html}: the folder {html.parent} does not exist: make it, or give another path")
    from sao_megatron.telemetry.inspect.page import page
    text, note = page(run, other)
    html.write_text(text, encoding="utf-8")
    print(f"{html}: {note}, {len(text) / 1e6:.1f} MB; open it in a browser")


def _range(step: str | None) -> tuple[int, int]:
    """First and last step of "A:B", "A:", ":B" or "A"."""
    if step is None:
        return 0, 2**31 - 1
    found = re.fullmatch(r"(\d*)(:?)(\d*)", step)
    if not found or step in ("", ":"):
        raise UserError(f"--step {step}: expected A:B (both included), A:, :B or A, such as 100:200")
    first, colon, last = found.groups()
    low = int(first or 0)
    high = int(last) if last else 2**31 - 1 if colon else low
    if low > high:
        raise UserError(f"--step {step}: the first step comes after the last; expected A:B with A ≤ B")
    return low, high
