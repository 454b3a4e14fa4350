"""Token records on disk: bounded size, token strings, and no fault that ends a run."""
from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from sao_megatron.telemetry.records import SCHEMA, Recorded, Recorder, Words, files_of, thin
from sao_megatron.trajectory.types import TrajectoryBuilder


def trajectory():
    builder = TrajectoryBuilder([1, 2], "p", "t")
    builder.add_action([3, 4], [-1.0, -2.0], [5, 6])
    builder.add_observation([2])
    builder.add_action([3], [-0.5], [6])
    builder.add_reward(1.0)
    return builder.build()


def write(folder, steps: int, limit_mb: float = 1.0) -> list[int]:
    """The steps whose files are there after `steps` were recorded."""
    recorder = Recorder(folder, limit_mb, folder / "none.json")
    for step in range(steps):
        recorder.write(step, 7, [Recorded(trajectory(), "sample", {"log_ratio": np.array([0, 1, 1e3], np.float32)})])
    return [int(path.stem.removeprefix("step-")) for path in files_of(folder)]


# If this fails, a column holds another's numbers, or a null is a number.
def test_columns(tmp_path):
    write(tmp_path, 1)
    table = pq.read_table(files_of(tmp_path)[0])
    assert table.schema.equals(SCHEMA, check_metadata=True)
    columns = table.to_pydict()
    assert columns["kind"] == ["prompt", "prompt", "action", "action", "observation", "action"]
    assert columns["lag"] == [None, None, 2, 1, None, 1] and columns["turn"] == [0, 0, 0, 0, 0, 1]
    assert columns["ratio"][2:] == [1.0, pytest.approx(np.e), None, float("inf")]
    assert columns["reward"] == [0, 0, 0, 0, 0, 1] and set(columns["trajectory_reward"]) == {1.0}
    assert columns["fate"] == columns["value"] == [None] * 6 and columns["token"] == [""] * 6


# If this fails, records fill the disk, or the newest are lost first.
def test_thinning(tmp_path):
    write(tmp_path, 1)
    size = files_of(tmp_path)[0].stat().st_size / 1e6
    steps = write(tmp_path, 40, limit_mb=8.5 * size)
    assert 4 <= len(steps) <= 8 and steps[0] == 0 and steps[-2:] == [38, 39]
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 8.5e6 * size
    thin(tmp_path, limit=1.0)
    assert [path.name for path in files_of(tmp_path)] == ["step-000039.parquet"]


# If this fails, a full disk or a folder in the way ends a run that trains well.
def test_faults_do_not_end_a_run(tmp_path, caplog):
    (tmp_path / "tokens").write_text("a file")
    assert write(tmp_path / "tokens", 1) == []
    assert "no token records of step 0" in caplog.text


# If this fails, a token is shown as nothing, or as a sign that stands for half a character.
def test_words(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(["a b"], trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=["<end>"]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = [tokenizer.token_to_id("<end>"), *tokenizer.encode("ab é").ids]
    words = Words(tmp_path / "tokenizer.json").of(np.array(ids))
    assert words[:4] == ["<end>", "a", "b", " "] and words[4:] == [tokenizer.id_to_token(id) for id in ids[4:]]
    assert Words(tmp_path / "none.json").of(np.array([3])) == [""]
