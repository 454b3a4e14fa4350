"""The process in which cells run, one after another, in one module's namespace: like an interactive interpreter."""
from __future__ import annotations

import ast
import linecache
import os
import signal
import struct
import sys
import traceback
import types

OK, ERROR = b"+", b"-"
"""What the warden is told at the end of a cell, one byte; OK also once, before the first."""


def main(cells: int, results: int) -> None:
    """Read cells (four bytes of length, then UTF-8) from the descriptor `cells` for ever."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.insert(0, "")
    if loaded := sys.modules.get("tempfile"):
        loaded.tempdir = None  # it was chosen outside
    os.write(results, OK)
    number = 0
    while True:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        (length,) = struct.unpack("<I", _read(cells, 4))
        source = _read(cells, length).decode()
        number += 1
        os.write(results, OK if _run(source, f"<cell {number}>", module.__dict__) else ERROR)


def _read(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def _run(source: str, name: str, variables: dict) -> bool:
    """Print what the cell prints, its last expression's value, or its error. Whether it ended without one."""
    # Streams of this cell's own: one before may have closed or replaced them.
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, encoding="utf-8", errors="replace", closefd=False)
                                         for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _execute(source, name, variables)
            return True
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.stdout.flush()
    except BaseException as error:
        _show(error, name)
        return False


def _execute(source: str, name: str, variables: dict) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    value = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), variables)
    if value is not None:
        result = eval(compile(ast.Expression(value.value), name, "eval"), variables)
        if result is not None:
            print(repr(result))


def _show(error: BaseException, name: str) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    os.write(2, text.encode(errors="replace"))
