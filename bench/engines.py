"""The parent's side of a worker: start it, ask it, hold it still while others run."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ignis.errors import IgnisError

_ROOT = Path(__file__).resolve().parents[1]


class WorkerError(IgnisError):
    """An engine's process that did not start, or failed."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to start an engine. `is_peer`: it is one that Ignis is compared with."""

    label: str
    command: tuple[str, ...]
    is_peer: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: tokens of the prompt, of decoding, and the least time a figure takes."""

    n_threads: int = 2
    n_prompt: int = 512
    n_decode: int = 128
    n_repeats: int = 5
    min_seconds: float = 0.4

    @property
    def n_ctx(self) -> int:
        """Positions that both engines are opened with."""
        return -(-max(self.n_prompt, self.n_decode + 32) // 256) * 256


def ignis_spec(model: Path, plan: Plan, layout: str) -> EngineSpec:
    label = "Ignis" if layout == "auto" else f"Ignis ({layout})"
    numbers = (plan.n_threads, plan.n_ctx, layout, plan.n_prompt, plan.n_decode)
    command = (sys.executable, "-m", "bench.ignis_worker", str(model), *map(str, numbers))
    return EngineSpec(label, command, is_peer=False)


def llama_specs(model: Path, plan: Plan, python: str) -> list[EngineSpec]:
    """llama.cpp with and without repacking of weights: neither is always the faster."""
    command = (python, "-m", "bench.llama_worker", str(model), str(plan.n_threads),
               str(plan.n_ctx))  # fmt: skip
    return [
        EngineSpec("llama.cpp (repack)", command, is_peer=True),
        EngineSpec("llama.cpp (no repack)", (*command, "--no-repack"), is_peer=True),
    ]


class Worker:
    """A running engine. It is stopped (SIGSTOP) unless it answers: the idle one can't spin."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        path = os.pathsep.join([str(_ROOT), str(_ROOT / "src")])
        try:
            self._process = subprocess.Popen(
                spec.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                text=True, encoding="utf-8", env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"cannot start it: {error.strerror}", where=spec.label,
                              got=spec.command[0]) from None
        try:
            self.about: dict[str, Any] = self._reply()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def measure(self, plan: Plan) -> dict[str, Any]:
        """One turn: seconds of prefill and decode, and what else the worker says."""
        return self._ask({"do": "measure", "n_prompt": plan.n_prompt, "n_decode": plan.n_decode,
                          "min_seconds": plan.min_seconds})

    def logits(self, n_tokens: int) -> NDArray[np.float32]:
        """The logits behind a prompt that all workers share, f32 [V]."""
        answer = self._ask({"do": "logits", "n_tokens": n_tokens})
        return np.frombuffer(base64.b64decode(answer["logits"]), "<f4")

    def close(self) -> None:
        """End the process; one that does not end by itself is killed."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._process.send_signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure() from None
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        """The next line; then the process is stopped."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"], where=self.spec.label)
        self._process.send_signal(signal.SIGSTOP)
        return reply

    def _failure(self) -> WorkerError:
        code = self._process.wait()
        self._errors.seek(0)
        last: Sequence[str] = self._errors.read().decode(errors="replace").strip().splitlines()
        return WorkerError(f"its process ended with code {code}", where=self.spec.label,
                           got=last[-1] if last else "no message")
