# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, controlled through its DevTools protocol: pages, expressions, screenshots."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MISSING = "Chromium is not installed here: apt-get install chromium-headless-shell"


def executable() -> str:
    return next((path for name in NAMES if (path := shutil.which(name))), "")


def shows(instance: str, wanted: str, column: int = 2) -> str:
    """Return an expression that is true when the status page shows the instance in this state, or with this fingerprint
    (column 4).
    """
    rows = f"[...document.querySelectorAll('#instances tr')].find(r => r.cells[0].innerText === '{instance}')"
    return f"{rows}?.cells[{column}]?.innerText === '{wanted}'"


class Tab:
    def __init__(self, line: ClientConnection, group: int) -> None:
        self._line = line
        self.group = group  # process group of the browser
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []  # exceptions of the page, and violations of its security policy
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._line.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = json.loads(self._line.recv(timeout=30))
            if said.get("id") == number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(said["params"]["exceptionDetails"]))
        elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["source"] == "security":
            self.complaints.append(said["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def ask(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        return str(self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until(self, script: str, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + timeout_s
        while not self.ask(script):
            assert time.monotonic() < end, f"it did not come true: {script}; the page shows:\n{self.text()}"
            time.sleep(0.05)

    def picture(self, file: Path, width: int = 1180, height: int = 900, scheme: str = "light") -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        shot = self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-proxy-server", "about:blank"]
    # Debian's command is a script that does not forward signals, so the browser gets a process group that is ended as a
    # whole.
    process = subprocess.Popen(
        [executable(), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port = _port(process, profile / "DevToolsActivePort")
        pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=10, trust_env=False).json()
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        with connect(address, max_size=64 << 20, proxy=None) as line:
            yield Tab(line, process.pid)
    finally:
        end(process.pid)
        process.wait(10)


def end(group: int, timeout_s: float = 10.0) -> None:
    """End every process of the group, with SIGKILL after `timeout_s`. Return when none is left."""
    begun = time.monotonic()
    number = signal.SIGTERM
    while members(group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        if time.monotonic() - begun > timeout_s:
            number = signal.SIGKILL
        time.sleep(0.05)


def members(group: int) -> list[int]:
    """Return the running processes of the group; zombies do not count."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
    return alive


def _port(process: subprocess.Popen[bytes], file: Path) -> int:
    end = time.monotonic() + 60
    while not (file.exists() and "\n" in file.read_text()):
        assert process.poll() is None and time.monotonic() < end, "Chromium did not start"
        time.sleep(0.05)
    return int(file.read_text().split("\n")[0])
