"""Attacks on the sandbox, each in a real one: the attack fails, and neighbours and successors work.

They need a machine that lets a user make namespaces; where it does not, the sandbox refuses to start and so do these.
"""
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.pool import Pool
from sao_megatron.sandbox.session import SandboxError

ROOT = Path(__file__).parents[2]
LIMITS = Limits(seconds=15, cpu_seconds=2, memory_mb=96, disk_mb=8, file_mb=4, processes=12, output=2000)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    try:
        async with Pool(LIMITS, sessions=4, cells=2, warm=1, modules=[]) as pool:
            await pool.check()
            yield pool
    except SandboxError as error:
        if "isolate" not in str(error):
            raise
        pytest.skip(str(error))


async def in_session(pool, *cells, seconds=None):
    """Results of cells run one after another in one session."""
    session = await pool.open()
    try:
        return [await session.run(cell, seconds) for cell in cells]
    finally:
        await session.close()


async def attack(pool, *cells, seconds=None):
    """The last cell's result, each after at most so many seconds. Afterwards the next session must work."""
    result = (await in_session(pool, *cells, seconds=seconds))[-1]
    [after] = await in_session(pool, "6 * 7")
    assert (after.status, after.output) == ("ok", "42\n")
    return result


def named(name):
    """Processes of this machine that call themselves so."""
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]


async def gone(name):
    """Whether they all end within some seconds."""
    for _ in range(100):
        if not named(name):
            return True
        await asyncio.sleep(0.05)
    return False


CALL_ITSELF = "import ctypes; ctypes.CDLL(None).prctl(15, b'{}')\n"


# If this fails, a session has more processes than it may, or a fork bomb hinders whoever comes after.
async def test_fork_bomb(pool):
    result = await attack(pool, """
import os
refused = 0
while True:
    try:
        os.fork()
    except BlockingIOError:
        refused += 1
""", seconds=1)
    assert result.status in ("cpu", "timeout") and not result.alive


# If this fails, threads are not counted as processes are.
async def test_thread_bomb(pool):
    result = await attack(pool, """
import threading, time
for count in range(1000):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
""")
    assert result.status == "error" and "can't start new thread" in result.output


# If one fails, a session can take the memory of the machine: in one process, or spread over many.
@pytest.mark.parametrize("code, message", [
    ("x = bytearray(2**30)", "MemoryError"),
    ("import mmap; mmap.mmap(-1, 2**30)", "Cannot allocate memory"),
    ("import os; os.memfd_create('x')", "Operation not permitted"),
    ("import ctypes; c = ctypes.CDLL(None, use_errno=True); c.shmget(0, 2**20, 0o1600), ctypes.get_errno()",
     "(-1, 1)"),
])
async def test_memory_bomb(pool, code, message):
    result = await attack(pool, code)
    assert message in result.output and result.alive


# If this fails, the memory of a session's processes is not added up.
async def test_memory_bomb_of_many_processes(pool):
    result = await attack(pool, """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(os.urandom(1)) * (40 * 2**20)
        time.sleep(100)
time.sleep(100)
""")
    assert (result.status, result.alive) == ("memory", False)


# If one fails, endless output fills our memory, blocks us, or is passed on to the model without end or notice.
@pytest.mark.parametrize("code", ["while True: print('x' * 1000)",
                                  "import os\nwhile True: os.write(1, b'x')",
                                  "import sys\nwhile True: sys.stderr.write('e' * 4096)"])
async def test_endless_output(pool, code):
    result = await attack(pool, code, seconds=1)
    assert result.status in ("timeout", "cpu") and len(result.output) < LIMITS.output + 100
    assert "bytes of output left out" in result.output


# If this fails, one line of 20 MB is held in memory, or the end of an output is lost.
async def test_huge_line(pool):
    [result] = await in_session(pool, "import sys\nfor _ in range(20): sys.stdout.write('y' * 10**6)\nprint('end')")
    assert result.status == "ok" and result.output.startswith("yyy") and result.output.endswith("yend\n")
    assert f"[… {20 * 10**6 + 4 - LIMITS.output} bytes of output left out …]" in result.output


# If this fails, code that does not end keeps its core, or code that can be interrupted loses the session's variables.
async def test_endless_loop(pool):
    assert (await attack(pool, "while True: pass", seconds=0.5)).status == "timeout"
    *_, result, after = await in_session(pool, "x = 5", "while True: pass", "x", seconds=0.5)
    assert result.alive and "variables are kept" in result.text() and after.output == "5\n"


# If one fails, code that refuses to be interrupted outlives its time.
@pytest.mark.parametrize("code", [
    "import time\nwhile True:\n    try:\n        time.sleep(0.01)\n    except BaseException: pass",
    "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "import signal\nfor n in (1, 2, 3, 15): signal.signal(n, lambda *_: None)\nwhile True: signal.pause()",
    "sum(iter(int, 1))",
])
async def test_refusing_to_be_interrupted(pool, code):
    result = await attack(pool, code, seconds=0.5)
    assert result.status in ("timeout", "cpu") and result.seconds < 4
    assert not result.alive and "all variables are lost" in result.text()


# If this fails, a process that a cell leaves behind survives its session: detached, deaf to SIGTERM, forking on.
async def test_daemon_ends_with_its_session(pool):
    session = await pool.open()
    result = await session.run(CALL_ITSELF.format("bandit") + """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in set(range(1, 65)) - {9, 19, 32, 33}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(0.05)
print("left behind")
""")
    assert result.output == "left behind\n"
    assert named("bandit")
    await session.close()
    assert await gone("bandit")


# If this fails, what a cell leaves running uses a core for as long as its trajectory lives.
async def test_processor_time_between_cells(pool):
    async with Pool(replace(LIMITS, cpu_seconds=0.2), sessions=1, cells=1, warm=0, modules=[]) as small:
        session = await small.open()
        await session.run(CALL_ITSELF.format("miner") + "import os\nif os.fork() == 0:\n    while True: pass")
        assert named("miner")
        assert await gone("miner")
        result = await session.run("1")
        assert (result.status, result.alive) == ("cpu", False)
        assert (await session.run("2")).output == "2\n"


# If this fails, sessions of the run die with their owner's crash only later, or never.
async def test_owner_killed(tmp_path):
    script = f"""
import asyncio
from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.pool import Pool
async def main():
    async with Pool(Limits(), 2, 1, 1, []) as pool:
        session = await pool.open()
        await session.run({CALL_ITSELF.format("orphan")!r} + "import os\\nif os.fork() == 0:\\n    os.setsid()\\n"
                          "    while True: pass")
        print("running", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert await asyncio.to_thread(owner.stdout.readline) == b"running\n"
        assert named("orphan")
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert await gone("orphan")


# If this fails, a machine that ends the sandbox's processes passes for a fault of the model's code, or ends the run.
async def test_template_killed():
    async with Pool(LIMITS, sessions=2, cells=2, warm=1, modules=[]) as pool:
        session = await pool.open()
        await session.run("x = 1")
        psutil.Process(pool._template.process.pid).kill()
        with pytest.raises(SandboxError, match="killed from outside"):
            await session.run("import time; time.sleep(1)")
        while pool._template.alive:
            await asyncio.sleep(0.01)
        for _ in range(3):
            assert (await in_session(pool, "2"))[0].output == "2\n"


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


# If this fails, a session fills the disk: with one file, with many, or with empty ones.
async def test_filling_the_disk(pool):
    results = await in_session(
        pool, "open('a', 'wb').write(b'x' * 6 * 2**20)",
        "for i in range(5): open(f'b{i}', 'wb').write(b'x' * 3 * 2**20)",
        "import os\nfor name in os.listdir(): os.remove(name)\nfor i in range(10**6): os.mknod(f'e{i}')")
    for result, message in zip(results, ["File too large", "No space left", "No space left"], strict=True):
        assert message in result.output


# If one fails, a cell that ends its interpreter ends more than that, or is not reported.
@pytest.mark.parametrize("code", ["import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)",
                                  "import os; os.abort()", "import ctypes; ctypes.string_at(0)",
                                  "import os; os.close(3); os.close(4)", "import os; os.closerange(0, 99)",
                                  "import os; os.execv('/bin/true', ['true'])"])
async def test_ending_the_interpreter(pool, code):
    result = await attack(pool, code)
    assert (result.status, result.alive) == ("ended", False)


# If one fails, code that leaves or breaks its streams loses the session, though it need not.
@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise KeyboardInterrupt", "exit()", "input()",
                                  "raise BaseException", "import sys; sys.stdout.close(); print(1)", "x = (",
                                  "print('\\ud800')\n1 / 0", "'\0'", "def f(): f()\nf()"])
async def test_error_keeps_the_session(pool, code):
    result, after = await in_session(pool, code, "41 + 1")
    assert result.status == "error" and result.alive and result.output
    assert after.output == "42\n"


# If one fails, forged results end more than their own session, or keep us waiting.
@pytest.mark.parametrize("code", [
    "import os, time\nos.write(4, b'+')\ntime.sleep(0.3)\nprint('late')",
    "import os\nos.write(4, b'-+-+' * 100)",
    "import os\nos.write(1, b'\\x10\\0\\0\\0{\"status\": \"ok\"}')",
    "import os\nos.write(4, b'{}' * 20000)",
    "import os\nwhile True: os.write(4, b'{\"alive\"')"])
async def test_forging_the_protocol(pool, code):
    result = await attack(pool, code, "1", "2", seconds=1)
    assert result.status in ("ok", "error", "timeout") and result.seconds < 4


# If this fails, code of any size is held in memory and passed on.
async def test_code_of_a_megabyte(pool):
    result, after = await in_session(pool, "#" * 10**6, "#" * 200_000 + "\n5")
    assert (result.status, after.output) == ("error", "5\n")


# If this fails, cells wait for each other without need, or more run at a time than may.
async def test_sessions_run_beside_each_other(pool):
    started = time.monotonic()
    results = await asyncio.gather(*(in_session(pool, "import time; time.sleep(0.5); 1") for _ in range(4)))
    assert all(result.status == "ok" for [result] in results)
    assert 1.0 <= time.monotonic() - started  # two at a time


ONE_CELL = """
import asyncio, sys
from sao_megatron.sandbox.limits import Limits
from sao_megatron.sandbox.pool import Pool
from sao_megatron.sandbox.session import SandboxError
async def main():
    async with Pool(Limits(seconds=5, processes=4), 1, 1, 0, []) as pool:
        await pool.check()
        session = await pool.open()
        print((await session.run("import os; os.getuid(), os.getpid()")).output)
        print((await session.run("while True: os.fork()")).text())
try:
    asyncio.run(main())
except SandboxError as error:
    print(error)
"""


def in_namespace(*options, before="true", code=None):
    """Output of `code` (ONE_CELL) in a user namespace that `unshare` makes with `options`, after `before`."""
    return subprocess.run(["unshare", "--user", *options, "sh", "-c", f'{before}; exec "$0" -c "$1"', sys.executable,
                           code or ONE_CELL], capture_output=True, text=True).stdout


# If one fails, the sandbox does not start in a container that has one user only, or a fork bomb goes off there.
@pytest.mark.parametrize("options", [["--map-root-user"], ["--map-user=1234", "--map-group=1234"]])
async def test_in_a_container_with_one_user(pool, options):
    output = in_namespace(*options)
    assert "(1000, 2)" in output
    assert "too many processes" in output or "BlockingIOError" in output


# If this fails, the sandbox needs root.
@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root has run all the tests above so")
async def test_without_root(pool):
    view = f"""mount --bind "{sys.base_prefix}" /mnt  # its own folder may be root's alone
        cd /
        export PYTHONPATH="{ROOT}" LD_LIBRARY_PATH=/mnt/lib
        exec setpriv --reuid=4321 --regid=4321 --clear-groups /mnt/bin/python3 -c "$0" """
    done = subprocess.run(["unshare", "--mount", "sh", "-c", view, ONE_CELL], capture_output=True, text=True)
    assert "(1000, 2)" in done.stdout and "BlockingIOError" in done.stdout, done.stderr


# If this fails, the sandbox runs open where it cannot isolate.
async def test_refused_where_it_cannot_isolate(pool):
    output = in_namespace("--map-root-user", before="echo 0 > /proc/sys/user/max_user_namespaces")
    assert output.startswith("this machine cannot isolate a sandbox: ")


PREPARE = """
from sao_megatron import config, errors, launcher
for task in ("guess_number", "coding"):
    try:
        launcher.check_sandbox(config.parse({"name": "x", "model": {"path": "m"}, "task": {"name": task}}))
        print(task, "may run")
    except errors.UserError as error:
        print(error)
"""


# If this fails, a run that needs a sandbox starts where it cannot have one, or any other run is refused there.
async def test_run_refused_where_it_cannot_isolate(pool):
    lines = in_namespace("--map-root-user", before="echo 0 > /proc/sys/user/max_user_namespaces", code=PREPARE)
    assert lines.startswith("guess_number may run\ntask coding runs a model's code, and this machine cannot isolate")
