"""Headless Chromium as a test's eyes: pages opened wide or narrow, light or dark, and asked what they show.

Place in the flow: the fixture `browser` is one Chromium for a whole run of the tests. Invariant: it speaks to
loopback alone.
"""

import asyncio
import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a page did in a browser."""

    errors: list[str]
    answers: dict[str, Any]
    screenshot: bytes


class Browser:
    """Headless Chromium, asked through its DevTools. A page is opened once for each question."""

    def __init__(self, port: int) -> None:
        self._port = port

    def open(
        self, page: Path, *, width: int, dark: bool, questions: dict[str, str], media: str = "screen"
    ) -> Seen:
        """Load `page` on a screen (or paper) so wide, wait until it is still, and evaluate `questions`."""
        opened = self._open(page, width, dark=dark, questions=questions, media=media)
        return asyncio.run(asyncio.wait_for(opened, timeout=240))

    async def _open(
        self, page: Path, width: int, *, dark: bool, questions: dict[str, str], media: str
    ) -> Seen:
        from tornado.httpclient import AsyncHTTPClient
        from tornado.websocket import websocket_connect

        made = await AsyncHTTPClient().fetch(
            f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT", body="", request_timeout=60
        )
        url = json.loads(made.body)["webSocketDebuggerUrl"]
        socket = await websocket_connect(url, max_message_size=1 << 28)
        tab = _Tab(socket)
        for domain in ("Page", "Runtime", "Log"):
            await tab.ask(f"{domain}.enable")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await tab.ask("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await tab.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])
        await tab.ask("Page.navigate", url=page.as_uri())
        await tab.until("Page.loadEventFired")
        answers = {name: await tab.evaluate(question) for name, question in questions.items()}
        shot = await tab.ask("Page.captureScreenshot", captureBeyondViewport=True)
        socket.close()
        return Seen(errors=tab.errors, answers=answers, screenshot=base64.b64decode(shot["data"]))


class _Tab:
    """Calls and events of one tab; what a page complains about is kept."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self._events: set[str] = set()
        self.errors: list[str] = []

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = await self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])

    async def evaluate(self, expression: str) -> Any:
        answer = await self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        return answer["result"].get("value")

    async def until(self, event: str) -> None:
        while event not in self._events:
            await self._next()

    async def _next(self) -> dict[str, Any]:
        text = await self._socket.read_message()
        assert text is not None, "Chromium closed the page"
        message: dict[str, Any] = json.loads(text)
        method, params = message.get("method", ""), message.get("params", {})
        self._events.add(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))
        return message


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, or a skip where there is none that starts."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    profile = tmp_path_factory.mktemp("chromium")
    flags = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank",
    )  # fmt: skip
    with subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            port = _port(profile / "DevToolsActivePort", running)
            if port is None:
                pytest.skip("Chromium does not start here")
            yield Browser(port)
        finally:
            running.terminate()


def _port(announced: Path, running: subprocess.Popen[bytes]) -> int | None:
    """The port that Chromium says it listens on; None if it ends, or says nothing for a minute."""
    for _ in range(600):
        if announced.exists() and (text := announced.read_text(encoding="utf-8")).count("\n"):
            return int(text.split()[0])
        if running.poll() is not None:
            return None
        time.sleep(0.1)
    return None
