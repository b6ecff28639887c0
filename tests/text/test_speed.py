"""The speeds and sizes that are promised, best of several.

Seconds are of processor time, so that a busy machine does not count against us.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from ignis.gguf import open_gguf
from ignis.text import Tokenizer
from tests.text.vocabularies import SHARED, TINY, TINY_PIECES, tiny, write_pieces

LLAMA_2 = SHARED / "ggml-vocab-llama-spm.gguf"
QWEN_2 = SHARED / "ggml-vocab-qwen2.gguf"
_LENGTH = 1_000_000

# Prints seconds (best of five) and peak megabytes of opening a vocabulary with its merges.
_OPEN = """
import sys, time
from ignis.gguf import open_gguf
from ignis.text import Tokenizer
import regex
peak = lambda: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
Tokenizer.from_gguf(open_gguf(sys.argv[2]))
before, seconds = peak(), []
for _ in range(5):
    started = time.process_time()
    tokenizer = Tokenizer.from_gguf(open_gguf(sys.argv[1]))
    seconds.append(time.process_time() - started)
    if len(seconds) == 1:
        megabytes = (peak() - before) / 1000
print(min(seconds), megabytes)
"""


def english() -> str:
    """A megabyte of Python's language reference, which is part of its standard library."""
    text = "\n".join(topics.values())
    return (text * (_LENGTH // len(text) + 1))[:_LENGTH]


def source_code() -> str:
    """A megabyte of Python's standard library."""
    files = sorted(Path(subprocess.__file__).parent.glob("*.py"))
    return "".join(f.read_text("utf-8", "replace") for f in files)[:_LENGTH]


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "pieces":
        return Tokenizer.from_gguf(open_gguf(LLAMA_2 if LLAMA_2.exists() else TINY_PIECES))
    return Tokenizer.from_gguf(open_gguf(QWEN_2)) if QWEN_2.exists() else tiny("qwen2")


@pytest.mark.parametrize("text", [english(), source_code()], ids=["english", "source code"])
def test_four_megabytes_a_second(tokenizer: Tokenizer, text: str) -> None:
    """Prompts of a book's length are encoded in a moment."""
    nbytes, seconds = len(text.encode()), []
    for _ in range(5):
        started = time.process_time()
        ids = tokenizer.encode(text)
        seconds.append(time.process_time() - started)
    assert nbytes / min(seconds) > 4e6, f"{nbytes / min(seconds) / 1e6:.1f} MB/s"
    assert tokenizer.decode(ids) == text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(not QWEN_2.exists(), reason="the shared vocabularies are not there")
def test_opening_a_large_vocabulary() -> None:
    """151,936 tokens and 151,387 merges: under 0.15 s and 40 MB, the mapped file included."""
    done = subprocess.run([sys.executable, "-c", _OPEN, str(QWEN_2), str(TINY)],
                          capture_output=True, text=True, check=True)  # fmt: skip
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 0.15
    assert megabytes < 40


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_opening_a_large_vocabulary_of_pieces(tmp_path: Path) -> None:
    """262,144 pieces, as many as Gemma 3 has: under 0.15 s and 60 MB, the mapped file included."""
    pieces = [f"{'▁' * (i % 2)}{i:x}{'abcdefgh'[: i % 9]}" for i in range(262_144 - 260)]
    path = write_pieces(tmp_path / "v.gguf", pieces)
    done = subprocess.run([sys.executable, "-c", _OPEN, str(path), str(TINY)],
                          capture_output=True, text=True, check=True)  # fmt: skip
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 0.15
    assert megabytes < 60
