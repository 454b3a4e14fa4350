"""`sao-megatron inspect`: what the token records of a run say, in the terminal and as one page. Needs no torch."""
from __future__ import annotations

import re
from pathlib import Path

from sao_megatron.errors import UserError
from sao_megatron.telemetry.inspect.data import Run, load


def inspect(run_dir: Path, html: Path | None = None, compare: Path | None = None, step: str | None = None,
            serve: int | None = None) -> None:
    """Print the report of a run (beside that of `compare`), or write the page to `html`; steps `step` = "A:B" only.
    With `serve`, a port, show pages there until Ctrl-C.

    Raises UserError where a folder holds no records, or none of those steps.
    """
    steps = _range(step)
    run, other = load(run_dir, steps), load(compare, steps) if compare else None
    if serve is not None:
        _serve(run_dir, serve)
    elif html is None:
        from sao_megatron.telemetry.inspect.terminal import report
        report(run, other)
    else:
        _write(html, run, other)


def _write(html: Path, run: Run, other: Run | None) -> None:
    if not html.parent.is_dir():
        raise UserError(f"--html {html}: the folder {html.parent} does not exist: make it, or give another path")
    from sao_megatron.telemetry.inspect.page import page
    text, note = page(run, other)
    html.write_text(text, encoding="utf-8")
    print(f"{html}: {note}, {len(text) / 1e6:.1f} MB; open it in a browser")


def _serve(run_dir: Path, port: int) -> None:
    from sao_megatron.telemetry.inspect.page import page
    from sao_megatron.telemetry.inspect.serve import PageServer
    run_dir = run_dir.absolute()
    with PageServer(run_dir.parent, port, lambda folder, step: page(load(folder, _range(step)))[0]) as server:
        print(f"{server.address(run_dir)} shows the run, and each step's page is at …/<step>; other runs of "
              f"{run_dir.parent} by their names; Ctrl-C ends it", flush=True)
        server.serve_forever()


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
