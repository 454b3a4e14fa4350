"""TensorBoard scalars of evaluations: evaluation/<set>/solve_rate, pass@k and so on, and their mean over the sets."""
from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from sao_megatron.trajectory.store import EvaluationRow


def write_evaluation(folder: Path, step: int, rows: list[EvaluationRow]) -> None:
    """Write one evaluation's rows, one for each set, at learner step `step`. Its own file: the controller writes it,
    which does without torch."""
    values = {f"evaluation/{row.task_set}/{name}": value for row in rows for name, value in row.metrics.items()
              if name not in ("weight", "seconds")}
    values |= {f"evaluation/{row.task_set}/solve_rate": row.solved / row.episodes for row in rows}
    values |= {f"evaluation/{row.task_set}/reward": row.mean_reward for row in rows}
    values["evaluation/solve_rate"] = overall(rows)
    writer = EventFileWriter(str(folder))
    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    writer.add_event(Event(wall_time=rows[-1].time, step=step, summary=summary))
    writer.close()


def overall(rows: list[EvaluationRow]) -> float:
    """Mean solve rate of the sets of one evaluation by their weights."""
    return (sum(row.metrics["weight"] * row.solved / row.episodes for row in rows)
            / sum(row.metrics["weight"] for row in rows))
