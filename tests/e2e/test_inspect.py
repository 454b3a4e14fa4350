"""`sao-megatron inspect` in the terminal, on a folder of synthetic records: what it prints and what it refuses."""
from __future__ import annotations

import base64
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import zlib

import numpy as np
import pyarrow.parquet as pq
import pytest
from synthetic_run import make_run

from sao_megatron import cli
from sao_megatron.errors import UserError
from sao_megatron.telemetry.inspect import data
from sao_megatron.telemetry.inspect.serve import PageServer

EVERYTHING = (0, 10**6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of 5 steps × 8 trajectories."""
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / name, 5, 8, seed).path for seed, name in enumerate(("first", "second"))]


def printed(capsys, *argv) -> str:
    assert cli.main(["inspect", *map(str, argv)]) == 0
    return capsys.readouterr().out


# If this fails, looking at a run costs the start of torch, or needs it.
def test_needs_no_torch(runs):
    code = (f"import sys\nfrom sao_megatron import cli\ncli.main(['inspect', {str(runs[0])!r}])\n"
            "print(*({'torch', 'megatron', 'sglang'} & set(sys.modules)), file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "" and "By lag" in done.stdout


# If this fails, a table of the report is missing, or is of another run.
def test_report(runs, capsys):
    out = printed(capsys, runs[0], "--compare", runs[1])
    for part in ("Over the steps", "By lag", "By task", "By fate of first", "By fate of second", "divisible_hard",
                 "Most dropped tokens of first", "Worst trajectories of second",
                 "first: steps 0 to 4, 40 trajectories"):
        assert part in " ".join(out.split())


# If this fails, --step shows other steps than it says.
def test_steps_are_chosen(runs, capsys):
    assert "steps 1 to 3, 24 trajectories" in " ".join(printed(capsys, runs[0], "--step", "1:3").split())
    assert "steps 4 to 4" in printed(capsys, runs[0], "--step", "4:")


# If this fails, a share that the report or the page shows is not that of the tokens it names.
def test_groups_equal_brute_force(runs):
    run = data.load(runs[0], EVERYTHING)
    rows = [row for path in sorted((runs[0] / "tokens").iterdir()) for row in pq.read_table(path).to_pylist()]
    for group in data.by_lag(run):
        low, _, high = group.name.partition("-")
        mine = [row for row in rows if row["kind"] == "action" and row["chosen"] == "sample"
                and int(low) <= row["lag"] <= int(high or low)]
        weight = np.array([row["weight"] for row in mine])
        assert group.tokens == len(mine) > 0
        assert group.dropped_low == pytest.approx(np.mean([row["fate"] == "dropped_low" for row in mine]))
        assert group.effective_sample_size == pytest.approx(weight.sum()**2 / (len(mine) * (weight**2).sum()))
        assert group.discarded_mass == pytest.approx(
            1 - sum(row["ratio"] for row in mine if row["fate"] == "kept") / len(mine))
    for word in data.most_dropped(run, 3):
        mine = [row["fate"] for row in rows if row["token_id"] == word.id and row["kind"] == "action"
                and row["chosen"] == "sample"]
        assert (word.tokens, word.low) == (len(mine), mine.count("dropped_low"))
        assert any(row["token_id"] == word.id and row["token"] == word.text for row in rows)


# If one fails, a wrong argument ends in a traceback or in an empty report.
@pytest.mark.parametrize(("argv", "part"), [
    (["--step", "7:9"], "no token records of steps 7 to 9: they are of 0 to 4"), (["--step", "3:1"], "A ≤ B"),
    (["--step", "x"], "expected A:B"), (["--html", "nowhere/out.html"], "nowhere does not exist"),
    (["--compare", "nowhere"], "is not the folder of a run")])
def test_refusals(runs, capsys, argv, part):
    assert cli.main(["inspect", str(runs[0]), *argv]) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1


# If one fails, records that this version cannot read are read wrongly.
def test_foreign_records_are_refused(tmp_path, capsys):
    run = make_run(tmp_path / "old", 1, 4)
    (path,) = run.tokens_dir.iterdir()
    pq.write_table(pq.read_table(path).replace_schema_metadata({"sao_megatron.tokens": "0"}), path)
    assert cli.main(["inspect", str(run.path)]) == 2
    assert "has schema 0" in capsys.readouterr().err
    path.unlink()
    assert cli.main(["inspect", str(run.path)]) == 2
    assert "tokens.trajectories > 0" in capsys.readouterr().err


# If this fails, TensorBoard's links lead to nothing, to another run's page, or strangers can read the pages.
def test_served_pages(runs):
    def make_page(folder, step) -> str:
        return f"page of {data.load(folder, (0, 9)).name} {step}"
    with PageServer(runs[0].parent, 0, make_page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def get(path: str, host: str = "localhost:1") -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        assert get("/first") == (200, "page of first None") and get("/second/3") == (200, "page of second 3")
        assert 'href="/first"' in get("/")[1] and get("/first", "elsewhere.org:1")[0] == 403
        assert get("/third")[0] == get("/..%2Ffirst")[0] == get("/first/1/2")[0] == 404
        with pytest.raises(UserError, match="cannot be used"):
            PageServer(runs[0].parent, server.server_address[1], make_page)
        server.shutdown()


# If this fails, the step that a link names has a page without its trajectories.
def test_the_page_of_a_step(runs):
    with subprocess.Popen([sys.executable, "-m", "sao_megatron.cli", "inspect", str(runs[0]), "--serve", "0"],
                          stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{address}/3") as answer:
            text = answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    packed = zlib.decompress(base64.b64decode(re.search(r'id="data"[^>]*>([^<]+)<', text)[1]))
    header = json.loads(packed[4:4 + int.from_bytes(packed[:4], "little")])
    assert set(header["trajectories"]["step"]) == {3} and len(header["trajectories"]["step"]) == 8
