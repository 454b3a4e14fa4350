"""A headless Chromium, driven through its own protocol (Chrome DevTools Protocol over one WebSocket)."""
from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_SECONDS = 120.0
CODES = {"Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
EXECUTABLE = next((path for name in NAMES if (path := shutil.which(name))), None)
"""None: no Chromium on PATH."""


class Chromium:
    """`async with Chromium(folder) as browser`: one tab; `errors` collects what the page throws or logs as an error."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 900):
        self._profile, self._size = profile, (width, height)
        self._waiting: dict[int, asyncio.Future] = {}
        self._loaded, self._numbers = asyncio.Event(), itertools.count(1)
        self.errors: list[str] = []

    async def __aenter__(self) -> Chromium:
        command = [EXECUTABLE, "--headless=new", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
                   "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={self._profile}",
                   f"--window-size={self._size[0]},{self._size[1]}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self._process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            await self._connect(await self._port())
        except BaseException:
            self._end()
            raise
        return self

    async def _connect(self, port: int) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            (target,) = [one for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(*self._size)

    async def __aexit__(self, *_) -> None:
        self._reader.cancel()
        await self._session.close()
        self._end()

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # the session that it was started in: its helpers too
        self._process.wait(30)

    async def _port(self) -> int:
        file, deadline = self._profile / "DevToolsActivePort", time.monotonic() + START_SECONDS
        while not (file.is_file() and len(lines := file.read_text().splitlines()) == 2):
            assert self._process.poll() is None, f"{EXECUTABLE} ended with {self._process.returncode}"
            assert time.monotonic() < deadline, f"{EXECUTABLE} opened no port within {START_SECONDS:.0f} s"
            await asyncio.sleep(0.1)
        return int(lines[0])

    async def _read(self) -> None:
        async for message in self._socket:
            answer = message.json()
            method, about = answer.get("method"), answer.get("params", {})
            if "id" in answer:
                self._waiting.pop(answer["id"]).set_result(answer)
            elif method == "Page.loadEventFired":
                self._loaded.set()
            elif method == "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"]))
            elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
                self.errors.append(about["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
                self.errors.append(str(about["args"]))

    async def call(self, method: str, **parameters) -> dict:
        """One command of the protocol."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(asyncio.shield(self._waiting[number]), 120)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), 120)

    async def resize(self, width: int, height: int) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                        mobile=False)

    async def prefer(self, scheme: str) -> None:
        """light or dark."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def evaluate(self, expression: str):
        """The JSON value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not await self.evaluate(expression):
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {expression}; errors: {self.errors}"
            await asyncio.sleep(0.05)

    async def press(self, *keys: str) -> None:
        """Press keys by their names of KeyboardEvent.key; single letters also type."""
        for key in keys:
            typed = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": CODES[key]}
            await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **typed)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def point(self, x: float, y: float) -> None:
        """Move the mouse there, in CSS pixels."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, path: Path) -> None:
        """Write a PNG of what is in sight (the pictures of docs/inspect.md)."""
        picture = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))
