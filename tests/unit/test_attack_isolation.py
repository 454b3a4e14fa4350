"""A session sees, changes and reaches nothing outside of it: files, environments, sockets, processes, rights."""
import os
import socket
import sys

import pytest
from attacks import attack, in_session

pytestmark = pytest.mark.asyncio(loop_scope="module")


# If this fails, a session reads the run's files, the home folder, or another process's environment and memory.
async def test_reading_what_is_the_parents(pool, tmp_path, monkeypatch):
    secret = "s3cret-of-the-run"
    tmp_path.chmod(0o755)
    (tmp_path / "token").write_text(secret)
    (tmp_path / "token").chmod(0o644)
    monkeypatch.setenv("RUN_SECRET", secret)
    result = await attack(pool, f"""
import glob, os
found = []
def look(path):
    try:
        found.append((path, open(path, "rb").read(10**6)))
    except OSError:
        pass
paths = [{str(tmp_path / "token")!r}, {__file__!r}, {os.getcwd()!r} + "/pyproject.toml", "/etc/shadow", "/etc/hostname"]
for path in paths + glob.glob("/proc/*/environ") + [f"/proc/{{pid}}/environ" for pid in ({os.getpid()}, os.getppid())]:
    look(path)
for folder in (os.path.expanduser("~"), {os.path.expanduser("~")!r}, "/home", "/var", "/mnt", "/run", "/sys", "/proc"):
    found += [(folder, name) for name in (os.listdir(folder) if os.path.isdir(folder) else []) if name != ".pyenv"]
for number in range(3, 200):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(found, {secret!r} in str(os.environ))
""")
    allowed = [part for part in eval(result.output.rpartition(" ")[0])
               if not (isinstance(part, tuple) and part[0] == os.path.expanduser("~"))]
    assert allowed == [3, 4]  # the two pipes to its warden
    assert result.output.endswith("False\n")


# If this fails, a session sees more of a Python installation than programs and packages, or what it starts misses
# these.
async def test_what_is_seen_of_python(pool):
    listed, started = await in_session(pool, f"import os; print(set(os.listdir({sys.prefix!r})))", """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import aiohttp, sys; print(sys.prefix)"], capture_output=True, text=True).stdout
""")
    assert eval(listed.output) <= {"bin", "lib", "lib64", "pyvenv.cfg"}
    assert started.output == f"{sys.prefix + chr(10)!r}\n"


# If one fails, a session changes files: those of Python, which all sessions see, or the devices.
@pytest.mark.parametrize("path", [os.path.join(sys.prefix, "planted"), "/usr/planted", "/planted", "/etc/passwd",
                                  os.__file__])
async def test_writing_outside_of_the_temporary_folder(pool, path):
    before = os.path.exists(path)
    result = await attack(pool, f"open({path!r}, 'ab').write(b'x')")
    assert "Read-only file system" in result.output or "Permission denied" in result.output
    assert os.path.exists(path) == before or path == "/etc/passwd"


# If one fails, a session reaches the network, this machine's services, or the machine that holds a virtual one.
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"])
async def test_opening_sockets(pool, family):
    result = await attack(pool, f"import socket\nsocket.socket(socket.{family}, socket.SOCK_STREAM)")
    assert "Operation not permitted" in result.output


# If this fails, a service of ours can be reached past the filter: by TCP or by an abstract unix socket.
async def test_reaching_a_listener(pool):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0sandbox-test")
        unix.listen()
        result = await attack(pool, f"""
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
for family in (2, 1):
    print(libc.syscall(41 if {os.uname().machine == "x86_64"} else 198, family, 1, 0), ctypes.get_errno())
a, b = socket.socketpair()
for address in ("\\0sandbox-test", ("127.0.0.1", {tcp.getsockname()[1]})):
    try:
        a.connect(address)
        print("connected")
    except OSError as error:
        print("refused")
""")
        assert result.output.count("-1 1\n") == 2 and "connected" not in result.output
        for listener in (tcp, unix):
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept()


# If this fails, a session can end others, or what watches it.
async def test_killing_siblings(pool):
    victim = await pool.open()
    await victim.run("x = 'alive'")
    result = await attack(pool, """
import os, signal
killed = []
for pid in [*range(1, 5000), -1]:
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        except (ProcessLookupError, PermissionError):
            pass
print(killed)
""")
    assert result.output in ("[1]\n", "[]\n") and result.alive  # process 1 takes no signal from inside
    assert (await victim.run("x")).output == "'alive'\n"
    await victim.close()


# If one fails, a session gets back rights that it has dropped.
@pytest.mark.parametrize("call", ["os.unshare(os.CLONE_NEWUSER)", "os.setuid(0)", "os.chroot('/tmp')",
                                  "os.setns(os.open('/dev/null', 0), 0)",
                                  "__import__('resource').setrlimit(7, (4096, 4096))"])
async def test_regaining_rights(pool, call):
    result = await attack(pool, f"import os\n{call}")
    assert any(said in result.output for said in ("not permitted", "Invalid argument", "not allowed"))
