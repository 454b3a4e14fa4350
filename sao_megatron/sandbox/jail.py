"""What a session sees: namespaces of its own, a root folder made for it, no capability, few system calls.

The root is an empty tmpfs with read-only views of Python's programs and packages and of /usr, five devices, and an
empty folder of limited size, which is /tmp too; there is no /proc, no /sys, no home and no network interface that is
up. The caller has made the namespaces of users, processes, network, IPC and host name, and is process 1 in them.
"""
from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import suppress

from sao_megatron.sandbox import linux
from sao_megatron.sandbox.limits import Limits

NAMESPACES = os.CLONE_NEWUSER | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
USER = 1000
"""User and group id inside. Outside it is the caller's, or nobody where the caller is root."""
HOME = "/session"
"""The temporary folder. It is not /tmp, since a Python that lies in the machine's /tmp is shown there."""
_NOBODY = 65534
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MEGABYTE = 2**20


def write_id_maps(pid: int) -> None:
    """Give the new user namespace of process `pid` its ids. Called outside, by a process that has the ids to give."""
    root = os.geteuid() == 0 and _is_mapped(_NOBODY)
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        if kind == "gid" and not root:
            _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/{kind}_map", f"0 0 1\n{USER} {_NOBODY} 1\n" if root else f"{USER} {own} 1\n")
    # As root the caller keeps id 0 inside, to be able to reach a Python that lies in a private folder, until it drops.


def forget_groups() -> None:
    """Belong to no group that could open a file, where the caller may say so."""
    if os.geteuid() == 0 and _is_mapped(_NOBODY):
        os.setgroups([])


def _is_mapped(uid: int) -> bool:
    with open("/proc/self/uid_map") as file:
        extents = [[int(number) for number in line.split()] for line in file]
    return any(first <= uid < first + count for first, _, count in extents)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def close_in(limits: Limits) -> None:
    """Leave the outside for good: afterwards nothing but the temporary folder can be written."""
    _write("/proc/self/oom_score_adj", "1000")  # where the machine runs out of memory, sessions end first
    socket.sethostname("sandbox")
    os.unshare(os.CLONE_NEWNS)
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in _shown()}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    settings_text = ""
    settings = os.path.join(sys.prefix, "pyvenv.cfg")  # by which a Python that a cell starts finds its packages
    with suppress(FileNotFoundError), open(settings) as file:
        settings_text = file.read()
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=4096,mode=0755")
    os.chdir("/tmp")
    os.makedirs(HOME[1:])
    linux.mount("tmpfs", HOME[1:], "tmpfs", linux.MS_NOSUID | linux.MS_NODEV,
                f"size={int(limits.disk_mb * _MEGABYTE)},nr_inodes=10000,mode=1777")
    _fill_root(sources, devices)
    if settings_text:
        _write(settings[1:], settings_text)
    linux.become_root_folder()
    linux.mount("", "/", flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)
    os.chdir(HOME)
    for descriptor in (*sources.values(), *devices.values()):
        os.close(descriptor)


def _shown() -> list[str]:
    """Folders whose contents can be read inside: none lies in another. Of Python's own not all: beside these a virtual
    environment may hold pip's settings, with somebody's password."""
    python = {sys.base_prefix, sys.prefix, os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)}
    parts = {os.path.join(prefix, part) for prefix in python for part in ("bin", "lib", "lib64")}
    folders = {"/usr", *(path for path in parts if os.path.isdir(path) and not os.path.islink(path))}
    return sorted(path for path in folders if not any(path.startswith(other + "/") for other in folders))


def _fill_root(sources: dict[str, int], devices: dict[str, int]) -> None:
    """In the current folder, the root to be."""
    for path, descriptor in sources.items():
        os.makedirs(path[1:])
        linux.mount(f"/proc/self/fd/{descriptor}", path[1:], flags=linux.MS_BIND | linux.MS_REC)
        linux.make_read_only(path[1:])
    for path in ("/bin", "/lib", "/lib64"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), path[1:])
        elif os.path.isdir(path):
            raise OSError(f"{path} is no link into /usr, as it is where this was tried")
    os.makedirs("dev")
    for name, descriptor in devices.items():
        os.close(os.open(f"dev/{name}", os.O_CREAT))
        linux.mount(f"/proc/self/fd/{descriptor}", f"dev/{name}", flags=linux.MS_BIND)
    os.symlink(HOME, "dev/shm")
    if not os.path.exists("tmp"):
        os.symlink(HOME, "tmp")
    os.makedirs("etc")
    _write("etc/passwd", f"sandbox:x:{USER}:{USER}::{HOME}:/bin/sh\n")


def drop_rights() -> None:
    """Of this process and all that it starts."""
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    linux.drop_capabilities()
    linux.filter_system_calls()
    linux.hide_memory()


def address_space() -> int:
    """Bytes that this process has mapped. Not to be known inside, where there is no /proc."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_resources(limits: Limits, mapped: int) -> None:
    """Of this process and each that it starts; what they use together, the warden counts. `mapped`: address_space()."""
    for what, most in {
        resource.RLIMIT_AS: mapped + int(limits.memory_mb * _MEGABYTE),
        resource.RLIMIT_FSIZE: int(limits.file_mb * _MEGABYTE),
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        resource.setrlimit(what, (most, most))
