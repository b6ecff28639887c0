"""Whole texts to ids: what llama.cpp gives for its own cases, and for ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ignis.gguf import open_gguf
from ignis.text import Tokenizer
from tests.text.vocabularies import DATA, KINDS, SHARED, read_cases, tiny

BYTE_LEVEL = ("deepseek-llm", "gpt-2", "llama-bpe", "qwen2")


@pytest.mark.parametrize("kind", KINDS)
def test_own_cases(kind: str) -> None:
    """A clone alone shows a wrong cut or merge, for each kind of pre-tokenizer."""
    cases = list(read_cases(DATA / "tiny.inp", DATA / f"tiny.{kind}.out"))
    assert len(cases) > 40
    for text, ids in cases:
        assert tiny(kind).encode(text) == ids, text
        assert tiny(kind).decode(ids).encode() == text


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_shared_cases(name: str) -> None:
    """The real vocabularies give exactly llama.cpp's ids."""
    path = SHARED / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip("the shared vocabularies are not beside this checkout")
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    cases = list(read_cases(Path(f"{path}.inp"), Path(f"{path}.out")))
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids).encode() == text
