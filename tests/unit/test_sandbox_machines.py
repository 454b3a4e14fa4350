"""The sandbox in a container, without root, and where the machine cannot isolate it."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.asyncio(loop_scope="module")

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
