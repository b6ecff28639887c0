"""The process that renders chat templates: started when needed, killed when it takes too long."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from ignis.errors import TokenizerError

TIMEOUT_SECONDS = 2.0
_START_SECONDS = 20.0  # a busy machine may take long to start Python; no template runs by then


class WorkerProcess:
    """A `chat_worker` that answers one question at a time."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._finalizer: Any = None

    def start(self) -> None:
        """Start the process without waiting for it, so that the first answer comes sooner."""
        with self._lock:
            if self._process is None:
                self._start()

    def ask(self, question: str) -> dict[str, str]:
        """The answer to one JSON line; raises `TokenizerError` if it does not come in time."""
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                if not self._ready:
                    self._read_line(_START_SECONDS, "it did not start")
                    self._ready = True
                return self._exchange(question.encode("ascii"))
            except BaseException:
                self.close()  # the state of a half-read pipe is unknown; so is that of a killed one
                raise

    def close(self) -> None:
        """Stop the process; the next question starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None
        self._ready = False

    def _start(self) -> None:
        folders = dict.fromkeys(_folder(package) for package in ("jinja2", "markupsafe"))
        script = Path(__file__).with_name("chat_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *folders], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us, not for it
        )  # fmt: skip
        self._finalizer = weakref.finalize(self, _stop, self._process)

    def _exchange(self, question: bytes) -> dict[str, str]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(question + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _failed("the process that renders it has ended") from None
        answer: dict[str, str] = json.loads(
            self._read_line(self._timeout, f"it takes longer than {self._timeout:g} seconds")
        )
        return answer

    def _read_line(self, seconds: float, complaint: str) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe, parts, deadline = self._process.stdout, [b""], time.monotonic() + seconds
        while not parts[-1].endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not _readable(pipe, left):
                raise _failed(complaint)
            parts.append(pipe.read1(1 << 20))  # type: ignore[attr-defined]
            if not parts[-1]:
                raise _failed("it needs too much memory or time")  # the process died of it
        return b"".join(parts)


def _readable(pipe: IO[bytes], seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:  # `select` itself fails from 1024 files on
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def _failed(reason: str) -> TokenizerError:
    return TokenizerError("the chat template cannot be rendered", got=reason)


def _folder(package: str) -> str:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is a dependency"
    return str(Path(spec.origin).parent.parent)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not yet written cannot be
                pipe.close()
    process.wait()
