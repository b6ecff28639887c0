"""Whole texts to ids: what llama.cpp gives for its own cases, and for ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ignis import hub
from ignis.gguf import open_gguf
from ignis.settings import Settings
from ignis.text import Tokenizer
from tests.text.vocabularies import DATA, KINDS, SHARED, read_cases, tiny, tiny_pieces

REAL = ("deepseek-llm", "gpt-2", "llama-bpe", "qwen2", "llama-spm", "phi-3")


@pytest.mark.parametrize("kind", KINDS)
def test_own_cases(kind: str) -> None:
    """A clone alone shows a wrong cut or merge, for each kind of pre-tokenizer."""
    cases = list(read_cases(DATA / "tiny.inp", DATA / f"tiny.{kind}.out"))
    assert len(cases) > 40
    for text, ids in cases:
        assert tiny(kind).encode(text) == ids, text
        assert tiny(kind).decode(ids).encode() == text


def test_own_cases_of_pieces() -> None:
    """The same for a SentencePiece vocabulary."""
    cases = list(read_cases(DATA / "tiny.inp", DATA / "tiny.spm.out"))
    assert len(cases) > 40
    for text, ids in cases:
        assert tiny_pieces().encode(text) == ids, text
        assert tiny_pieces().decode(ids).encode() == text


@pytest.mark.parametrize("name", REAL)
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


def test_gemma() -> None:
    """The prompts of the golden file, by the real Gemma 3 and its 262,144 pieces."""
    path = hub.find_local("gemma3-270m", Settings.from_env())
    golden = SHARED.parent / "golden" / "gemma-3-270m-q4_k_m.json"
    if path is None or not golden.exists():
        pytest.skip("`ignis pull gemma3-270m` fetches the model of this test")
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    for case in json.loads(golden.read_text())["cases"]:
        assert tokenizer.encode(case["text"], add_special=case["add_bos"]) == case["ids"]
