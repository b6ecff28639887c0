"""One engine in a process of its own: requests come as JSON lines on stdin, replies on stdout.

    {"do": "measure", "n_prompt": 512, "n_decode": 128, "min_seconds": 0.4}
                                        -> {"prefill_s": ..., "decode_s": ..., "ceilings": [...]}
    {"do": "logits", "n_tokens": 16}    -> {"logits": base64 of little-endian f32}

The first line is written when the engine is ready. Only the standard library is imported here, so
that any interpreter can serve its own engine.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

SHORT_PROMPT = 8  # tokens before the decoding that is measured


class Engine(Protocol):
    """What a worker needs of an engine."""

    n_vocab: int

    def about(self) -> dict[str, Any]:
        """What the ready line says of the engine."""

    def clear(self) -> None:
        """Forget all tokens."""

    def feed(self, ids: Sequence[int]) -> None:
        """Append tokens and compute the last one's logits, done on return."""

    def logits(self) -> bytes:
        """The last token's logits, little-endian f32."""

    def ceilings(self) -> dict[str, float] | None:
        """What the machine can do now, where this engine can measure it."""


def serve(open_engine: Callable[[], Engine]) -> None:
    """Open the engine, then answer until stdin ends. Errors become a reply and exit code 1."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print must not end up between the replies

    def reply(fields: dict[str, Any]) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    try:
        engine = open_engine()
        reply({"n_vocab": engine.n_vocab, **engine.about()})
        for line in sys.stdin:
            request = json.loads(line)
            if request.pop("do") == "measure":
                before = engine.ceilings()
                seconds = measure(engine, **request)
                found = [ceilings for ceilings in (before, engine.ceilings()) if ceilings]
                reply({**seconds, "ceilings": found})
            else:
                engine.clear()
                engine.feed(token_ids(request["n_tokens"], engine.n_vocab))
                reply({"logits": base64.b64encode(engine.logits()).decode()})
    except Exception as error:
        # Those raised on purpose say all; a bug's message needs its type.
        on_purpose = isinstance(error, RuntimeError) or type(error).__module__ != "builtins"
        reply({"error": str(error) if on_purpose else f"{type(error).__name__}: {error}"})
        sys.exit(1)


def measure(engine: Engine, n_prompt: int, n_decode: int, min_seconds: float) -> dict[str, float]:
    """Seconds of a prompt, and of decoding behind a short one.

    Each is repeated until `min_seconds` are full; the median counts. Tokens are given, not
    sampled: only the engine is timed.
    """
    prompt = token_ids(n_prompt, engine.n_vocab)
    decoded = token_ids(n_decode, engine.n_vocab)

    def prefill() -> float:
        engine.clear()
        started = time.perf_counter()
        engine.feed(prompt)
        return time.perf_counter() - started

    def decode() -> float:
        engine.clear()
        engine.feed(prompt[:SHORT_PROMPT])
        started = time.perf_counter()
        for token in decoded:
            engine.feed([token])
        return time.perf_counter() - started

    return {"prefill_s": _median(prefill, min_seconds), "decode_s": _median(decode, min_seconds)}


def _median(run: Callable[[], float], min_seconds: float) -> float:
    end = time.perf_counter() + min_seconds
    seconds = [run()]
    while time.perf_counter() < end:
        seconds.append(run())
    return statistics.median(seconds)


def token_ids(n_tokens: int, n_vocab: int) -> list[int]:
    """Ids from all over the vocabulary, the same for every engine."""
    return [(i * 7919 + 13) % n_vocab for i in range(n_tokens)]
