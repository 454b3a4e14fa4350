"""Tasks by name: the built-in ones, or a class in a Python file (`path/to/file.py:Class`)."""
from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from sao_megatron.errors import UserError
from sao_megatron.rollout.tasks.base import Task


def load_task(name: str, options: dict[str, Any], model_dir: str | Path | None) -> Task:
    """Construct the task `name` with `options` as its constructor's arguments.

    A constructor with a parameter `model_dir` gets the HF model folder (for its tokenizer; None for a fresh model).
    Raises UserError for an unknown name, an unknown or missing option, and a value that the task refuses.
    """
    task_class = _task_class(name)
    parameters = dict(inspect.signature(task_class).parameters)
    extra = {"model_dir": model_dir} if parameters.pop("model_dir", None) else {}
    _check_options(name, options, parameters)
    try:
        return task_class(**options, **extra)
    except (TypeError, ValueError, OSError) as error:
        raise UserError(f"task {name} refuses its options {options}: {' '.join(str(error).split())}") from error


def _task_class(name: str) -> type:
    if name == "guess_number":
        from sao_megatron.rollout.tasks.guess_number import GuessNumber
        return GuessNumber
    if name == "levers":
        from sao_megatron.rollout.tasks.guess_number import Levers
        return Levers
    if name == "reasoning_gym":
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError("task reasoning_gym needs the package reasoning-gym: pip install reasoning-gym")
        from sao_megatron.rollout.tasks.reasoning_gym import ReasoningGym  # imports about 100 task families: seconds
        return ReasoningGym
    path, colon, class_name = name.rpartition(":")
    if not (colon and path.endswith(".py")):
        raise UserError(f"unknown task {name!r}: known are guess_number, levers, reasoning_gym and "
                        f"path/to/file.py:Class")
    return _class_of_file(Path(path), class_name)


def _class_of_file(path: Path, class_name: str) -> type:
    if not path.is_file():
        raise UserError(f"task file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"sao_task_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"task file {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(getattr(module, class_name, None)):
        classes = [key for key, value in vars(module).items()
                   if inspect.isclass(value) and value.__module__ == spec.name]
        raise UserError(f"task file {path} has no class {class_name!r}: its classes are {', '.join(classes) or 'none'}")
    return getattr(module, class_name)


def _check_options(name: str, options: dict[str, Any], parameters: dict[str, inspect.Parameter]) -> None:
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    for option in options:
        if (option not in named and not open_ended) or option == "model_dir":
            raise UserError(f"task {name} has no option {option!r}: its options are {', '.join(named) or 'none'}")
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(f"task {name} needs the option {option!r} (task.options.{option})")
