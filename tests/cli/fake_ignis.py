"""`ignis` with a fake model: run as a script by the tests, or through `load` in the process.

The model answers with the words of its prompt, a word a token; control words in the prompt make it
slow, endless or broken.
"""

import ctypes
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import ignis
from ignis.errors import NumericsError, PromptTooLongError


@dataclass
class GenerationStats:
    n_prompt: int
    prompt_seconds: float = 0.5
    n_generated: int = 0
    decode_seconds: float = 0.0
    finish_reason: str = ""


class FakeGeneration:
    def __init__(self, words, options, n_prompt):
        self.stats = GenerationStats(n_prompt)
        self.token_ids = []
        self._pieces = self._run(words, options)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._pieces)

    def _run(self, words, options):
        limit = options["max_tokens"]
        while True:
            for word in words:
                if limit is not None and len(self.token_ids) >= limit:
                    self.stats.finish_reason = "length"
                    return
                if word == "NAN":
                    raise NumericsError("not a number", where="logits of step 1")
                if word == "BUG":
                    raise ZeroDivisionError("division\nby zero")
                if word == "SLOW":
                    print("sleeping", file=sys.stderr, flush=True)
                    time.sleep(30)
                self.token_ids.append(len(self.token_ids))
                self.stats.n_generated += 1
                self.stats.decode_seconds += 0.25
                yield word + " "
            if "ENDLESS" not in words:
                break
        self.stats.finish_reason = "stop"


class FakeModel:
    def __init__(self, path, **options):
        self.path, self.options = path, options
        self.calls = []
        self.report = SimpleNamespace(lines=lambda: ["loaded fake", "compiler: 2 ops -> 1 op"],
                                      arena_nbytes=1024)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append("closed")

    def generate(self, prompt, **options):
        self.calls.append(("generate", prompt, options))
        return self._answer(prompt, options)

    def chat(self, messages, **options):
        self.calls.append(("chat", [dict(m) for m in messages], options))
        return self._answer(messages[-1]["content"], options)

    def _answer(self, prompt, options):
        if "LONG" in prompt:
            raise PromptTooLongError("the prompt is longer than the context", got=9, wanted=4)
        words = prompt.split()
        return FakeGeneration(words, options, len(words))


def load(path=None, **options):
    if "hang.gguf" in str(path):
        hold_the_interpreter()
    return FakeModel(path, **options)


def hold_the_interpreter():
    """A native call that no signal ends: a mutex is locked twice."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    print("hanging", file=sys.stderr, flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


if __name__ == "__main__":
    from ignis.cli import main

    ignis.load = load
    main()
