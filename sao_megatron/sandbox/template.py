"""The process that sessions are forked from: what they may want to import is there already, and nothing else is.

It is started by executing Python anew with an environment of its own, so that neither it nor a session holds anything
of the process that asked for it. `python -m` cannot be used: see pool.Template.
"""
from __future__ import annotations

import array
import gc
import importlib
import json
import os
import signal
import socket
import sys

from sao_megatron.sandbox import jail, warden
from sao_megatron.sandbox.limits import Limits


def main() -> None:
    """Arguments: limits and names of modules to import, both JSON; then fork a session for each connection received."""
    limits, modules = Limits(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    for name in modules:
        importlib.import_module(name)
    jail.forget_groups()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for wardens
    gc.collect()
    gc.freeze()  # what was imported stays shared with the sessions
    control = socket.socket(fileno=0)
    control.sendall(b"+")
    while connection := _next_connection(control):
        _fork_session(connection, limits, control)
        connection.close()


def _next_connection(control: socket.socket) -> socket.socket | None:
    """The next session's; None when nobody asks any more."""
    data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize))
    if not data:
        return None
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    return socket.socket(fileno=descriptors[0])


def _fork_session(connection: socket.socket, limits: Limits, control: socket.socket) -> None:
    asked, ask = os.pipe()
    answer, answered = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.detach()
            # Whoever waits for the template's end waits for that of its streams, too.
            nothing = os.open("/dev/null", os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 2)
            os.close(asked)
            os.close(answered)

            def mapped_us() -> None:
                os.write(ask, b"?")
                if not os.read(answer, 1):
                    raise PermissionError("the ids of a new user namespace could not be set")
            warden.watch(connection, limits, mapped_us)
        finally:
            os._exit(0)
    os.close(ask)
    os.close(answer)
    if os.read(asked, 1):  # nothing, where it failed before
        try:
            jail.write_id_maps(pid)
            os.write(answered, b"!")
        except OSError as error:
            print(f"ids of a session: {error}", file=sys.stderr)
    os.close(asked)
    os.close(answered)
