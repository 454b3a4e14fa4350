"""Tasks by name: the built-in ones, or a class in a Python file (`path/to/file.py:Class`)."""
from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any, NamedTuple

from sao_megatron.errors import UserError
from sao_megatron.rollout.tasks.base import Task
from sao_megatron.sandbox.session import Sandbox


class _Known(NamedTuple):
    module: str
    class_name: str
    package: str | None = None
    """What it needs installed, as pip names it."""
    imported: str | None = None
    """The same, as Python names it."""


_KNOWN = {
    "guess_number": _Known("guess_number", "GuessNumber"),
    "levers": _Known("guess_number", "Levers"),
    "mixture": _Known("mixture", "Mixture"),
    "reasoning_gym": _Known("reasoning_gym", "ReasoningGym", "reasoning-gym", "reasoning_gym"),
    "math_python": _Known("math_python", "MathPython", "math-verify", "math_verify"),
    "coding": _Known("coding", "Coding"),
    "bfcl": _Known("bfcl", "Bfcl", "bfcl-eval --no-deps", "bfcl_eval"),
    "textarena": _Known("text_game", "TextGame", "textarena", "textarena"),
}
_GIVEN = ("model_dir", "sandbox")
"""Constructor parameters that are no options."""


def load_task(name: str, options: dict[str, Any], model_dir: str | Path | None, sandbox: Sandbox | None = None) -> Task:
    """Construct the task `name` with `options` as its constructor's arguments.

    A constructor with a parameter `model_dir` gets the HF model folder (for its tokenizer; None for a fresh model), one
    with a parameter `sandbox` gets where to run code (None in a process that runs no episodes).
    Raises UserError for an unknown name, an unknown or missing option, and a value that the task refuses.
    """
    task_class, wanted = _task_class(name), check_options(name, options)
    given = {key: value for key, value in zip(_GIVEN, (model_dir, sandbox), strict=True) if key in wanted}
    try:
        return task_class(**options, **given)
    except (TypeError, ValueError, OSError) as error:
        raise UserError(f"task {name} refuses its options {options}: {' '.join(str(error).split())}") from error


def check_options(name: str, options: dict[str, Any]) -> set[str]:
    """What can be checked without the model: raises UserError for an unknown name, an unknown or a missing option.

    Returns which of model_dir and sandbox the constructor takes besides.
    """
    parameters = dict(inspect.signature(_task_class(name)).parameters)
    wanted = {key for key in _GIVEN if parameters.pop(key, None)}
    _check_options(name, options, parameters)
    return wanted


def runs_code(name: str, options: dict[str, Any]) -> bool:
    """Whether a task, or one of a mixture, needs a sandbox."""
    task_class = _task_class(name)
    parts = getattr(task_class, "parts_of", lambda options: [])(options)
    return any(runs_code(*part) for part in parts) if parts else "sandbox" in inspect.signature(task_class).parameters


def _task_class(name: str) -> type:
    if known := _KNOWN.get(name):
        if known.imported and importlib.util.find_spec(known.imported) is None:
            raise UserError(f"task {name} needs the package {known.package.split()[0]}: pip install {known.package}")
        module = importlib.import_module(f"sao_megatron.rollout.tasks.{known.module}")  # some take seconds
        return getattr(module, known.class_name)
    if ".py:" not in name:
        raise UserError(f"unknown task {name!r}: known are {', '.join(_KNOWN)} and path/to/file.py:Class")
    return load_class(name)


def load_class(name: str) -> type:
    """That of `path/to/file.py:Class`. Raises UserError."""
    file, _, class_name = name.rpartition(":")
    path = Path(file)
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
        if (option not in named and not open_ended) or option in _GIVEN:
            raise UserError(f"task {name} has no option {option!r}: its options are {', '.join(named) or 'none'}")
    for option, parameter in named.items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(f"task {name} needs the option {option!r} (task.options.{option})")
