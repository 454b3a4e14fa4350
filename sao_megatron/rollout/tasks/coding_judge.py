"""Runs in a session of the sandbox, not here (coding.py sends this text): a model's function, called from its tests.

Tests that share an interpreter with the code they test can be deceived by it: it may replace whatever they compare
with. So the code has a process of its own, begun before the tests are known, and nothing but plain data comes back.
"""
from __future__ import annotations

import builtins
import linecache
import os
import pickle
import sys
import traceback
from contextlib import suppress
from typing import Any


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"the function answered with a {module}.{name}: only plain data can be compared")


class Candidate:
    """The function `name` that `source` defines. Raises what it raises, or what defining it raises."""

    unfit = ""
    """Said where the tests call it with what cannot be handed over, which is not its fault."""

    def __init__(self, source: str, name: str):
        # What the tests import must not be found where the code can write.
        sys.path[:] = [path for path in sys.path if path and os.path.isdir(path) and not os.access(path, os.W_OK)]
        (asked, ask), (answers, answer) = os.pipe(), os.pipe()
        if os.fork() == 0:
            try:
                _serve(asked, answer, source, name)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answer)
        self.__name__, self._ask, self._answers = name, open(ask, "wb", buffering=0), open(answers, "rb")
        self._answer()

    def __call__(self, *arguments, **named):
        try:
            call = pickle.dumps((arguments, named))
        except Exception as error:
            raise TypeError(f"{self.unfit} {error}") from None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._ask.write(call)
        return self._answer()

    def _answer(self) -> Any:
        try:
            raised, value = _Plain(self._answers).load()
        except EOFError:
            raise RuntimeError("the code ended its interpreter") from None
        if raised is None:
            return value
        kind, text = getattr(builtins, str(raised[0]), None), str(raised[1])
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)


def _serve(asked: int, answer: int, source: str, name: str) -> None:
    """The code's process: no descriptor but these two leads out of it."""
    for descriptor in set(range(os.sysconf("SC_OPEN_MAX"))) - {asked, answer}:
        with suppress(OSError):
            os.close(descriptor)
    for _ in range(3):
        os.open("/dev/null", os.O_RDWR)
    calls, answers = open(asked, "rb"), open(answer, "wb", buffering=0)
    linecache.cache["<answer>"] = (len(source), None, source.splitlines(keepends=True), "<answer>")
    variables: dict[str, Any] = {"__name__": "__main__"}

    def define() -> None:
        exec(compile(source, "<answer>", "exec"), variables)
        _ = variables[name]
    answers.write(_tried(define))
    while True:
        try:
            arguments, named = pickle.load(calls)
        except EOFError:
            return
        answers.write(_tried(variables[name], *arguments, **named))


def _tried(function, *arguments, **named) -> bytes:
    """(None, its result) or ((name of an exception, traceback), None)."""
    try:
        return pickle.dumps((None, function(*arguments, **named)))
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != "<answer>":
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        return pickle.dumps(((type(error).__name__, text), None))
