"""A page in headless Chromium, looked at over its debugging pipe: no driver, no socket, nothing to install beside it.

Chromium reads commands from descriptor 3 and writes answers to descriptor 4, each a JSON text that ends with a zero
byte (the DevTools protocol, `--remote-debugging-pipe`).
"""

import base64
import fcntl
import itertools
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from tools.clients.with_chromium import chromium_command

_PATIENCE_S = 600.0
_LOOK_S = 0.2
_FREE_DESCRIPTOR = 10
"""From there on: 3 and 4 are the browser's."""


class BrowserError(Exception):
    """The browser ended, did not answer, or refused."""


class BrowserPage:
    """One open page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._unread = b""
        self._target: str | None = None
        self._session: str | None = None

    def open(self, url: str) -> None:
        """Go there, in a new page in place of the last one, and wait until it is loaded. Raises BrowserError."""
        self._session = None
        if self._target is not None:
            self._ask("Target.closeTarget", targetId=self._target)
        self._target = self._ask("Target.createTarget", url=url)["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """What the script comes to, in the page. Raises BrowserError where it throws."""
        told = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise BrowserError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait_for(self, script: str, patience_s: float = _PATIENCE_S) -> Any:
        """The script's value, as soon as it counts as true. Raises BrowserError."""
        deadline = time.monotonic() + patience_s
        while not (found := self.value(script)):
            if time.monotonic() > deadline:
                raise BrowserError(f"{script}: not true within {patience_s:.0f} s")
            time.sleep(_LOOK_S)
        return found

    def picture(self, width: int, height: int) -> bytes:
        """A PNG of the page, in a window of that size."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (told := self._read()).get("id") != number:
            pass  # an event
        if "error" in told:
            raise BrowserError(f"{method}: {told['error']['message']}")
        result: dict[str, Any] = told["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE_S)
            got = os.read(self._from, 1 << 20) if ready else b""
            if not got:
                raise BrowserError("the browser does not answer" if not ready else "the browser has ended")
            self._unread += got
        text, _, self._unread = self._unread.partition(b"\0")
        told: dict[str, Any] = json.loads(text)
        return told


@contextmanager
def browser(chromium: str) -> Iterator[BrowserPage]:
    """A browser with a new profile, ended with the block. `chromium`: its program."""
    (commands_out, commands_in), (answers_out, answers_in) = os.pipe(), os.pipe()
    given = [fcntl.fcntl(end, fcntl.F_DUPFD, _FREE_DESCRIPTOR) for end in (commands_out, answers_in)]
    os.close(commands_out)
    os.close(answers_in)
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        argv = [*chromium_command(chromium, profile), "--remote-debugging-pipe", "about:blank"]
        shell = 'exec 3<&{} 4>&{}; exec "$@"'.format(*given)
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *argv],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in given:
            os.close(end)
        try:
            yield BrowserPage(commands_in, answers_out)
        finally:
            os.close(commands_in)
            os.close(answers_out)
            process.terminate()
            process.wait()
