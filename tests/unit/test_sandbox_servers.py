"""Sandbox servers, each a process of its own, and the client that spreads sessions over them and outlives them."""
import asyncio
import json
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import aiohttp
import psutil
import pytest

from sao_megatron import config as run_config
from sao_megatron.engine.process import free_port
from sao_megatron.run_folder import RunFolder
from sao_megatron.sandbox.client import RemoteSandbox
from sao_megatron.sandbox.session import SandboxError

pytestmark = pytest.mark.slow


class Servers:
    """Of one run's folder, started by the verb that a run starts them with."""

    def __init__(self, path, count, **section):
        self.folder = RunFolder(path)
        config = run_config.parse({"name": "test", "task": {"name": "guess_number"}, "model": {"path": "nowhere"},
                                   "sandbox": {"servers": count, "modules": [], "cells": 1, "warm": 1} | section})
        run_config.save(config, self.folder.config_path)
        self.folder.place_sandboxes([f"http://127.0.0.1:{free_port()}" for _ in range(count)])
        self.urls, self.token = self.folder.sandboxes()
        self.processes = [self.start(index) for index in range(count)]

    def start(self, index):
        return subprocess.Popen([sys.executable, "-m", "sao_megatron.cli", "sandbox", str(self.folder.path),
                                 "--index", str(index)], stdout=subprocess.PIPE)

    async def health(self, index):
        async with aiohttp.ClientSession() as http, http.get(f"{self.urls[index]}/health") as answer:
            return await answer.json()

    async def sessions(self):
        return [(await self.health(index))["sessions"] for index in range(len(self.urls))]


def started_by(process):
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def all_end(processes):
    """Whether they do within ten seconds; what nobody has waited for has ended too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(is_alive(process) for process in processes):
            return True
        time.sleep(0.02)
    return False


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def served(path, count, patience=20.0, **section):
    """(Servers that listen, a client)."""
    servers = Servers(path, count, **section)
    try:
        for process in servers.processes:
            assert b"sandbox server at" in await asyncio.to_thread(process.stdout.readline)
        async with RemoteSandbox(servers.urls, servers.token, 5.0, patience) as client:
            yield servers, client
    finally:
        below = [child for process in servers.processes for child in started_by(process)]
        for process in servers.processes:
            process.terminate()
        codes = [process.wait(10) for process in servers.processes]
        assert set(codes) <= {0, -9}  # told to end, they do so in order
        assert all_end(below)


# If this fails, sessions are not spread by load, end with others, or stay when they are closed.
async def test_sessions_go_where_there_is_room(tmp_path):
    async with served(tmp_path, 2) as (servers, client):
        sessions = [await client.open() for _ in range(4)]
        for number, session in enumerate(sessions):
            assert (await session.run(f"x = {number}")).status == "ok"
        assert await servers.sessions() == [2, 2]
        results = await asyncio.gather(*(session.run("x") for session in sessions))
        assert [result.output for result in results] == ["0\n", "1\n", "2\n", "3\n"]
        for session in sessions:
            await session.close()
        assert await servers.sessions() == [0, 0]


NO_CALLS = ["", "[]", "{}", json.dumps({"session": 1, "cell": "x", "code": 2, "seconds": "y"}),
            json.dumps({"session": "a", "cell": 0, "code": "1", "seconds": -1})]


# If this fails, anyone who reaches a server's port runs code on it; or its health needs a token, or shows one;
# or what is no call makes the server fail.
async def test_only_with_the_token(tmp_path):
    async with served(tmp_path, 1) as (servers, client):
        assert servers.folder.sandboxes_path.stat().st_mode & 0o777 == 0o600
        assert await servers.health(0) == {"sessions": 0, "capacity": 256, "running": 0, "cells": 1}
        async with RemoteSandbox(servers.urls, "guessed", 5.0, 1.0) as stranger:
            with pytest.raises(SandboxError, match="401.*token"):
                await (await stranger.open()).run("1")
        async with aiohttp.ClientSession() as http:
            async with http.delete(f"{servers.urls[0]}/session/x") as answer:
                assert answer.status == 401
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {servers.token}"}) as http:
            for body in NO_CALLS:
                async with http.post(f"{servers.urls[0]}/run", data=body) as answer:
                    assert answer.status == 400, body
        await client.check()


# If this fails, a server's death loses an episode, or gives it back without its variables.
async def test_server_killed(tmp_path):
    async with served(tmp_path, 2) as (servers, client):
        session = await client.open()
        await session.run("x = [1]")
        await session.run("x.append(2)\nprint('once')")
        await session.run("1 / 0")
        victim = (await servers.sessions()).index(1)
        below = started_by(servers.processes[victim])
        servers.processes[victim].kill()
        assert len(below) >= 4 and all_end(below)  # template, wardens, inits, workers
        result = await session.run("x.append(3)\nx")
        assert (result.status, result.output) == ("ok", "[1, 2, 3]\n")
        servers.processes[1 - victim].kill()
        servers.processes.append(servers.start(victim))
        assert (await session.run("x")).output == "[1, 2, 3]\n"  # at a server that was started again
        await session.close()


# If this fails, a cell that runs while its server dies is lost, or waited for without end.
async def test_server_killed_in_a_cell(tmp_path):
    async with served(tmp_path, 2) as (servers, client):
        session = await client.open()
        await session.run("x = 7")
        victim = (await servers.sessions()).index(1)
        running = asyncio.create_task(session.run("import time; time.sleep(0.6); x"))
        await asyncio.sleep(0.3)
        servers.processes[victim].kill()
        assert (await running).output == "7\n"


# If this fails, variables that cannot be brought back are silently missing.
async def test_what_cannot_be_repeated_is_an_error(tmp_path):
    async with served(tmp_path, 1, patience=15.0) as (servers, client):
        session, other = await client.open(), await client.open()
        assert (await session.run("x = 0\nwhile True: x += 1", 0.3)).status == "timeout"
        await other.run("y = 1")
        await other.run("import os; os._exit(0)")  # its variables are gone anyway: nothing to repeat
        servers.processes[0].kill()
        servers.processes.append(servers.start(0))
        with pytest.raises(SandboxError, match="cannot be repeated"):
            await session.run("x")
        assert "NameError" in (await other.run("y")).output


# If this fails, a call waits for ever where all servers are full, or does not go on when there is room.
async def test_full(tmp_path):
    async with served(tmp_path, 1, sessions=1, patience=0.6) as (_, client):
        first, second = await client.open(), await client.open()
        await first.run("1")
        with pytest.raises(SandboxError, match="had room for 1 s .sandbox.patience.: .* full"):
            await second.run("2")
        waiting = asyncio.create_task(second.run("3"))
        await first.close()
        assert (await waiting).output == "3\n"


# If this fails, a run waits for ever for servers that are all dead.
async def test_no_server_left(tmp_path):
    async with served(tmp_path, 1, patience=0.3) as (servers, client):
        session = await client.open()
        await session.run("1")
        servers.processes[0].kill()
        started = time.monotonic()
        with pytest.raises(SandboxError, match="does not answer"):
            await session.run("2")
        assert time.monotonic() - started < 10


# If this fails, sessions of a controller that was killed fill the servers.
async def test_idle_sessions_end(tmp_path):
    async with served(tmp_path, 1, idle_timeout=0.4) as (servers, client):
        session = await client.open()
        await session.run("x = 1")
        while await servers.sessions() != [0]:
            await asyncio.sleep(0.1)
        assert (await session.run("x")).output == "1\n"  # begun anew, with its variables
