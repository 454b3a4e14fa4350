"""The system calls that Python has no function for, and the filter of those that a cell may not make."""
from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_READ_ONLY_NO_SUID = 3  # MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 4, 38, 22
_SYS_MOUNT_SETATTR = 442

_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, {
        "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438,
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429,
        "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "unshare": 272,
        "setns": 308, "open_by_handle_at": 304, "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "init_module": 175, "finit_module": 313, "kexec_load": 246,
        "shmget": 29, "msgget": 68, "semget": 64, "memfd_create": 319, "memfd_secret": 447,
        "clone": 56, "clone3": 435}),
    "aarch64": (0xC00000B7, {
        "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438,
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "open_tree": 428, "move_mount": 429,
        "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "unshare": 97,
        "setns": 268, "open_by_handle_at": 265, "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "init_module": 105, "finit_module": 273, "kexec_load": 104,
        "shmget": 194, "msgget": 186, "semget": 190, "memfd_create": 279, "memfd_secret": 447,
        "clone": 220, "clone3": 435}),
}
"""Architecture's audit number, and numbers of the calls that are refused (of `clone` only what makes namespaces).

socket: no address family reaches out, AF_VSOCK least of all, which no network namespace holds. memfd_create, shmget …:
memory that no process limit counts. The others are what a container's usual filter refuses too.
"""
_EPERM, _ENOSYS = 1, 38
_NAMESPACE_FLAGS = 0x7E020000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()),
           f"mount on {target}")


def make_read_only(path: str) -> None:
    """The mount at `path` and all mounts below it: read-only, without set-user-id programs."""
    attributes = struct.pack("4Q", _READ_ONLY_NO_SUID, 0, 0, 0)
    _check(_libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), -100, path.encode(), _AT_RECURSIVE, attributes,
                         ctypes.c_size_t(len(attributes))), f"mount_setattr of {path}")


def become_root_folder() -> None:
    """Make the current folder, a mount, the root; nothing of the old one stays reachable."""
    number = _SYSTEM_CALLS[platform.machine()][1]["pivot_root"]
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _prctl(option: int, value: int = 0, pointer: object = 0, what: str = "prctl") -> int:
    return _check(_libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)), what)


def die_with_parent() -> None:
    """By SIGKILL. A change of user forgets it: call it after that."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def hide_memory() -> None:
    """No process of the same user may trace this one or read its memory."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """All of them, for ever: no program that is executed brings any back."""
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, nothing), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_system_calls() -> None:
    """Refuse those of the table with EPERM from now on, in this process and all that it starts."""
    audit, numbers = _SYSTEM_CALLS[platform.machine()]
    program = b"".join(struct.pack("HBBI", *line) for line in _filter(audit, dict(numbers)))
    code = ctypes.create_string_buffer(program)
    _prctl(_PR_SET_SECCOMP, 2, struct.pack("HP", len(program) // 8, ctypes.addressof(code)), "seccomp")


def _filter(audit: int, numbers: dict[str, int]) -> list[tuple[int, int, int, int]]:
    """BPF lines (code, jump if true, jump if false, constant), see seccomp(2)."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    clone, clone3 = numbers.pop("clone"), numbers.pop("clone3")
    lines = [(load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, _KILL),
             (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (answer, 0, 0, _ERRNO | _ENOSYS),  # x86's third ABI
             (equal, 0, 1, clone3), (answer, 0, 0, _ERRNO | _ENOSYS)]  # its flags lie in memory; clone then takes over
    lines += [line for number in numbers.values() for line in ((equal, 0, 1, number), (answer, 0, 0, _ERRNO | _EPERM))]
    return lines + [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, _NAMESPACE_FLAGS),
                    (answer, 0, 0, _ERRNO | _EPERM), (answer, 0, 0, _ALLOW)]


def supported() -> str | None:
    """None, or why this machine cannot hold a sandbox, as far as that is known without trying."""
    if platform.system() != "Linux" or platform.machine() not in _SYSTEM_CALLS:
        return f"it runs on Linux on {' or '.join(_SYSTEM_CALLS)}, this is {platform.system()} {platform.machine()}"
    if tuple(int(part) for part in platform.release().split(".")[:2]) < (5, 14):
        return f"it needs Linux 5.14 or newer, this is {platform.release()}"
    return None
