"""The Python API: load a model, generate text, chat, look at logits.

    model = ignis.load("model.gguf")                    # or ignis.load() for the default model
    for piece in model.generate("Once upon", max_tokens=64): print(piece, end="")
    for piece in model.chat([{"role": "user", "content": "Hi"}]): print(piece, end="")
    model.tokenize(text), model.detokenize(ids), model.logits(ids)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ignis import hub
from ignis.compile import CompileReport, compile_model
from ignis.errors import PromptTooLongError, UsageError
from ignis.gguf import GGUFFile, open_gguf
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.models import ModelConfig
from ignis.runtime.engine import MAX_LOGITS, MAX_TOKENS, Engine
from ignis.runtime.guard import guard_mappings
from ignis.runtime.step import StepBatch
from ignis.sampling import Sampler
from ignis.settings import Settings
from ignis.text import ChatTemplate, StreamDecoder, Tokenizer
from ignis.text.chat_process import WorkerProcess


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    n_ctx: int | None = None,
    engine: str = "graph",
    pre: str | None = None,
    weights: str = "auto",
    kv_type: str = DEFAULT_KV_TYPE,
    prepare_chat: bool = False,
) -> Model:
    """Load a GGUF file and compile it for this processor.

    Args:
        path: a file, a name that `ignis pull` knows, or None for the default model.
        threads: default: what affinity and the cgroup quota allow.
        n_ctx: positions of the context; default: 4096, or fewer if the model has fewer.
        engine: "graph", "imperative" (op by op, same bits) or "reference" (float64 NumPy).
        pre: the pre-tokenizer, where the file names none that is known.
        weights: "auto", "mapped" (as they lie in the file) or "packed" (faster, in memory).
        kv_type: how keys and values are kept: "f16", "f32" or, in half the memory, "q8_0".
        prepare_chat: start the process that renders chat templates while the model compiles; the
            first `chat` then begins some 60 ms sooner.

    Raises: ModelFileError, UnsupportedModelError, TokenizerError, UsageError, DownloadError.
    """
    started = time.perf_counter()
    settings = Settings.from_env()
    with ExitStack() as undo:  # where loading fails
        worker = WorkerProcess()
        undo.callback(worker.close)
        if prepare_chat:  # first of all: it is up before packing wants every processor
            worker.start()
        file = open_gguf(hub.resolve(None if path is None else Path(path) if isinstance(
            path, os.PathLike) else path, settings))
        undo.callback(file.close)
        unguard = guard_mappings(file.mappings)  # packing reads the whole file already
        undo.callback(unguard)
        runner, config, report = compile_model(
            file, settings, engine=engine, n_threads=threads, n_ctx=n_ctx, weights=weights,
            kv_type=kv_type,
        )  # fmt: skip
        undo.callback(runner.close)
        tokenizer = Tokenizer.from_gguf(file, pre)  # while weights are packed
        source = file.metadata.get("tokenizer.chat_template")
        template = ChatTemplate(source if isinstance(source, str) else None, tokenizer, worker)
        runner.settle()
        report = report._replace(seconds=time.perf_counter() - started)
        model = Model(file, tokenizer, template, runner, config, report, unguard)
        undo.pop_all()
    return model


@dataclass(slots=True)
class GenerationStats:
    """What a generation took. `finish_reason`: "stop", "length", "context", or "" while it runs."""

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_generated: int = 0
    decode_seconds: float = 0.0
    finish_reason: str = ""


class TokenSequence:
    """One sequence in a slot of the engine: what it has been fed, and where it stands."""

    def __init__(self, engine: Engine, slot: int = 0) -> None:
        self._engine, self._slot = engine, slot
        self.ids: list[int] = []

    @property
    def n_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return len(self.ids)

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens, in steps of at most 512; logits f32 [V] of the last one."""
        if not ids:
            raise UsageError("there is nothing to feed", got="no tokens", wanted="at least one")
        last = len(ids) - 1 - (len(ids) - 1) % MAX_TOKENS  # where the last step begins
        for start in range(0, last, MAX_TOKENS):
            self._step(ids[start : start + MAX_TOKENS], [])
        logits: NDArray[np.float32] = self._step(ids[last:], [len(ids) - last - 1])[0]
        return logits

    def feed_all(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Append tokens and yield the logits of all of them, f32 [n, V] at a time."""
        for start in range(0, len(ids), MAX_LOGITS):
            part = ids[start : start + MAX_LOGITS]
            yield self._step(part, range(len(part)))

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens`."""
        del self.ids[n_tokens:]
        self._engine.truncate(self._slot, n_tokens)

    def _step(self, ids: Sequence[int], rows: Sequence[int]) -> NDArray[np.float32]:
        start = len(self.ids)
        positions = range(start, start + len(ids))
        logits = self._engine.forward(StepBatch(ids, [self._slot] * len(ids), positions, rows))
        self.ids += ids
        return logits


class Model:
    """A compiled model. Use it from one thread at a time; close it, or use `with`."""

    def __init__(
        self, file: GGUFFile, tokenizer: Tokenizer, template: ChatTemplate, engine: Engine,
        config: ModelConfig, report: CompileReport, unguard: Callable[[], None],
    ) -> None:  # fmt: skip
        self.config, self.report, self.tokenizer = config, report, tokenizer
        self._file, self._template, self._engine = file, template, engine
        self._unguard = unguard
        self._sequence = TokenSequence(engine)

    @property
    def n_ctx(self) -> int:
        """Positions of the context."""
        return self._engine.n_ctx

    @property
    def engine(self) -> Engine:
        """What runs the steps."""
        return self._engine

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text; `special` parses control tokens in it (trusted text only)."""
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; control tokens are left out."""
        return self.tokenizer.decode(ids)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits at every position of a text of its own: float32 [len(ids), V]."""
        self._check_length(len(ids))
        sequence = self.new_sequence()
        result = np.empty((len(ids), self.config.n_vocab), np.float32)
        start = 0
        for part in sequence.feed_all(ids):
            result[start : start + len(part)] = part
            start += len(part)
        return result

    def new_sequence(self) -> TokenSequence:
        """An empty sequence in this model's slot; the one before it must not be used any more."""
        self._sequence.truncate(0)
        self._sequence = TokenSequence(self._engine)
        return self._sequence

    def generate(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = 512, special: bool = False,
        stop: Sequence[str] = (), **sampling: Any,
    ) -> Generation:  # fmt: skip
        """Continue a prompt (text, or token ids), piece by piece.

        Args:
            max_tokens: None runs until the model stops or the context is full.
            special: parse control tokens in the prompt text (trusted text only).
            stop: texts before which the generation ends.
            sampling: `temperature`, `top_k`, `top_p`, `min_p`, `repeat_penalty`, `seed`; see
                `ignis.sampling.Sampler`.

        Raises: PromptTooLongError, UsageError; NumericsError for logits that are no numbers.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, special=special, add_special=True)
        else:
            ids = list(prompt)
        return Generation(self, ids, max_tokens, list(stop), Sampler(**sampling))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = 512,
        stop: Sequence[str] = (), **sampling: Any,
    ) -> Generation:  # fmt: skip
        """Answer a conversation, [{"role": "user", "content": "Hi"}, ...], by the chat template.

        What earlier calls left in the KV cache is reused as far as the conversation agrees with
        it. Arguments and errors as for `generate`; TokenizerError for a template that fails.
        """
        ids = self._template.encode(messages)
        return Generation(self, ids, max_tokens, list(stop), Sampler(**sampling))

    def close(self) -> None:
        """Stop the threads and the template's process, and unmap the file. Twice does no harm."""
        self._engine.close()
        self._template.close()
        self._unguard()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self, ids: Sequence[int]) -> tuple[TokenSequence, int]:
        """The sequence, cut back to what it shares with `ids`, and how many tokens those are.

        At least the last token is left to feed: its logits are needed. The bits are the same as
        without the cache.
        """
        held = self._sequence.ids
        limit = min(len(held), len(ids) - 1)
        shared = next((i for i in range(limit) if held[i] != ids[i]), limit)
        self._sequence.truncate(shared)
        return self._sequence, shared

    def _check_length(self, n_tokens: int) -> None:
        if n_tokens > self.n_ctx:
            raise PromptTooLongError("the prompt is longer than the context",
                                     got=f"{n_tokens} tokens", wanted=f"at most {self.n_ctx}",
                                     hint="shorten it or raise --ctx")  # fmt: skip
        if n_tokens < 1:
            raise UsageError("the prompt is empty", got="no tokens", wanted="at least one")


class Generation(Iterator[str]):
    """Text pieces as they are generated; `stats` and `token_ids` say how it went so far."""

    def __init__(
        self, model: Model, ids: list[int], max_tokens: int | None, stop: list[str],
        sampler: Sampler,
    ) -> None:  # fmt: skip
        model._check_length(len(ids))
        if max_tokens is not None and max_tokens < 0:
            raise UsageError("max_tokens makes no sense", got=max_tokens, wanted="0 or more")
        if "" in stop:
            raise UsageError("an empty stop text would stop at once", wanted="a text")
        self.stats = GenerationStats(n_prompt=len(ids))
        self.token_ids: list[int] = []
        self._pieces = self._run(model, ids, max_tokens, _StopTexts(stop), sampler)

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(
        self, model: Model, prompt: list[int], max_tokens: int | None, stop: _StopTexts,
        sampler: Sampler,
    ) -> Iterator[str]:  # fmt: skip
        stats, decoder = self.stats, StreamDecoder(model.tokenizer)
        started = time.perf_counter()
        sequence, shared = model._resume(prompt)
        logits = sequence.feed(prompt[shared:])
        stats.prompt_seconds = time.perf_counter() - started
        history = list(prompt)
        while not stats.finish_reason:
            if max_tokens is not None and stats.n_generated >= max_tokens:
                stats.finish_reason = "length"
                break
            started = time.perf_counter()
            token = sampler.sample(logits, history)
            if token in model.tokenizer.stop_ids:
                stats.finish_reason = "stop"
                break
            history.append(token)
            self.token_ids.append(token)
            stats.n_generated += 1
            text = stop.push(decoder.push(token))
            if stop.found:
                stats.finish_reason = "stop"
            elif sequence.n_tokens >= model.n_ctx:
                stats.finish_reason = "context"
            stats.decode_seconds += time.perf_counter() - started
            if text:
                yield text      # before the next step: the first one has a plan to make
            if not stats.finish_reason and (max_tokens is None or stats.n_generated < max_tokens):
                started = time.perf_counter()
                logits = sequence.feed([token])
                stats.decode_seconds += time.perf_counter() - started
        if not stop.found:
            rest = stop.push(decoder.flush()) + stop.flush()
            if rest:
                yield rest


class _StopTexts:
    """Holds back what may become a stop text, and ends before the first that appears."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; what can be shown of all that was added so far."""
        self._held += text
        places = [at for stop in self._texts if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        kept = max((self._overlap(stop) for stop in self._texts), default=0)
        cut = len(self._held) - kept
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """How many last characters of what is held begin `stop`."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
