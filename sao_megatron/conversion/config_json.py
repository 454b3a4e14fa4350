"""The config.json of a checkpoint of either kind: one of the learner's has it in its run's model folder."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sao_megatron.checkpoints import STATE, read_state
from sao_megatron.errors import UserError
from sao_megatron.weights import hf
from sao_megatron.weights.families import family_of
from sao_megatron.weights.maths import differences


def model_directory(folder: Path) -> Path:
    """Where config.json and tokenizer of a checkpoint lie: in it, or where the run of the learner has its model."""
    if (folder / "config.json").is_file():
        return folder
    if not (folder / STATE).is_file():
        raise UserError(f"{folder} has neither config.json nor {STATE}: it is no HF folder and no checkpoint of the "
                        f"learner, or not a complete one")
    match read_state(folder):
        case {"config": {"model": {"path": str(path)}}}:
            model_dir = Path(path)
        case _:
            model_dir = folder.resolve().parents[1] / "model"
    if not (model_dir / "config.json").is_file():
        raise UserError(f"{folder}: the model that it was trained from is not at {model_dir}: say where its "
                        f"config.json and tokenizer are with --model")
    return model_dir


def of(folder: Path, model_dir: Path | None = None) -> dict:
    """The config of the checkpoint `folder`, read from `model_dir` and checked; without `model_dir` the one that lies
    in it, or that its state.json holds, wherever the checkpoint was copied to. Raises UserError, also where state.json
    says that the checkpoint's model computes something else."""
    state = read_state(folder)
    if model_dir is None and not (folder / "config.json").is_file() and "hf_config" in state:
        with _naming(folder / STATE):
            config = hf.canonical(state["hf_config"])
            family_of(config)
        return config
    path = (model_dir or model_directory(folder)) / "config.json"
    with _naming(path):
        config = hf.read_config(path.parent)
        family_of(config)
    match state:
        case {"hf_config": dict(trained)}:
            with _naming(folder / STATE):
                other = differences(hf.canonical(trained), config)
            if other:
                raise UserError(f"{folder} is of another model than {path} ({', '.join(other)}): name the folder of "
                                f"the model that was trained (--model)")
    return config


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Sentences of what can be wrong with a config do not say which one it is, and here there are several."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error} (in {path})") from None
