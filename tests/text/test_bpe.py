"""Byte pair merging: machine code against its eager twin, the plain twin and hostile inputs."""

from __future__ import annotations

import doctest
import random
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ignis.errors import TokenizerError
from ignis.gguf import StringArray, open_gguf
from ignis.kernels.bpe import merge_words, scratch_nbytes
from ignis.kernels.eager import run_eager
from ignis.text import Tokenizer, bytelevel, pretokenize
from ignis.text.bpe import NativeMerger, merge_plain
from ignis.text.bytelevel import BYTE_TO_CHARACTER, to_bytes, to_characters
from ignis.text.hashing import HashIndex, Spans, place, table_bits
from tests.text.vocabularies import tiny, write_vocabulary

TABLE = tiny().model.table
# Letters and pairs that the vocabulary knows, so that many merges compete.
WORDS = st.text("abcdeinorst ", max_size=40).map(str.encode) | st.binary(max_size=40)


def test_byte_map() -> None:
    """The map is a bijection on all 256 bytes, with the spellings every vocabulary uses."""
    assert len(set(BYTE_TO_CHARACTER)) == 256
    assert all(c.isprintable() and not c.isspace() for c in BYTE_TO_CHARACTER)
    every = bytes(range(256))
    assert to_bytes(to_characters(every)) == every
    assert to_characters(b" \n\t\0a\xad") == "ĠĊĉĀaŃ"
    assert to_bytes("Ġ▁我") == b" " + "▁我".encode()  # characters off the map: their own UTF-8


@settings(max_examples=300, deadline=None)
@given(words=st.lists(WORDS, max_size=12))
def test_native_equals_plain(words: list[bytes]) -> None:
    """The heap and the linked list do what the few plain lines say."""
    assert NativeMerger(TABLE)(words) == [merge_plain(word, TABLE) for word in words]


def test_native_equals_eager() -> None:
    """The same kernel body on NumPy, with every memory access checked."""
    words = [b"", b"the engine", b"symbols", b"aaaaaaa", b"x", b" merge the pairs", b"\xff\x00"]
    offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    longest = max(map(len, words))
    out, counts = np.zeros(int(offsets[-1]), np.int32), np.zeros(len(words), np.int32)
    args = {
        "text": np.frombuffer(b"".join(words), np.uint8).copy(), "offsets": offsets,
        "byte_symbols": TABLE.byte_symbols, "slots": TABLE.slots.view(np.int64),
        "n_bits": TABLE.n_bits, "capacity": longest, "out": out, "counts": counts,
    }  # fmt: skip
    run_eager(merge_words(), args, 0, len(words), np.zeros(scratch_nbytes(longest), np.uint8))
    flat = [symbol for word in NativeMerger(TABLE)(words) for symbol in word]
    assert out[: counts.sum()].tolist() == flat


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_rules(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Rules in any order, twice the same, with parts that are no tokens: still the plain result."""
    rng = random.Random(seed)
    symbols = list("abc")
    rules = []
    for _ in range(rng.randrange(1, 30)):
        left, right = rng.choice(symbols), rng.choice(symbols)
        rules.append(f"{left} {right}")
        symbols.append(left + right)
    rng.shuffle(rules)
    merged = {s for s in symbols if len(s) > 1 and rng.random() < 0.8}
    tokens = sorted({*BYTE_TO_CHARACTER, *merged})
    path = write_vocabulary(tmp_path_factory.mktemp("bpe") / "v.gguf", tokens, rules, pre="qwen2")
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    table = tokenizer.model.table
    words = ["".join(rng.choice("abc") for _ in range(rng.randrange(30))) for _ in range(20)]
    data = [word.encode() for word in words]
    assert NativeMerger(table)(data) == [merge_plain(word, table) for word in data]
    for word in words:
        assert tokenizer.decode(tokenizer.encode(word)) == word


@pytest.mark.parametrize("text", ["a" * 1_000_000, "letters"], ids=["one letter", "random letters"])
def test_worst_inputs_are_near_linear(text: str) -> None:
    """A megabyte without a space is no trap."""
    if text == "letters":
        text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000))
    tiny().encode("warm")
    started = time.process_time()
    ids = tiny().encode(text)
    assert time.process_time() - started < 2
    assert tiny().decode(ids) == text


def test_missing_bytes_are_dropped(tmp_path: Path) -> None:
    """Some vocabularies lack bytes; no control token may stand in for them."""
    tokens = [c for c in BYTE_TO_CHARACTER if c != "b"]
    path = write_vocabulary(tmp_path / "v.gguf", tokens, ["a c"], unknown_token_id=255)
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    assert tokenizer.decode(tokenizer.encode("abcac")) == "acac"
    assert not any(map(tokenizer.is_control, tokenizer.encode("abc")))


@pytest.mark.parametrize("rule", ["ab", " a", "a ", "", " "])
def test_bad_rules(tmp_path: Path, rule: str) -> None:
    """A rule that is not two symbols is named with file and number."""
    path = write_vocabulary(tmp_path / "v.gguf", BYTE_TO_CHARACTER, ["a b", rule])
    with pytest.raises(TokenizerError, match=r"v\.gguf: tokenizer\.ggml\.merges: .* rule 1"):
        Tokenizer.from_gguf(open_gguf(path))


@settings(max_examples=100, deadline=None)
@given(strings=st.lists(st.binary(max_size=40) | st.sampled_from([b"", b"abcdefgh", b"abcdefghi"])))
def test_hash_index(strings: list[bytes]) -> None:
    """Finds the first of equal strings, and nothing that is not there."""
    array = StringArray.from_strings(strings)
    index = HashIndex(Spans(array.data, array.offsets, array.lengths).hashes())
    wanted = [*strings, b"not there", b"abcdefgh\0"]
    expected = [strings.index(s) if s in strings else -1 for s in wanted]
    assert index.find(Spans.of(wanted).hashes()).tolist() == expected


def test_crowded_slots() -> None:
    """Keys that all want one slot are still placed, wrapping around the end."""
    keys = np.arange(100, dtype=np.uint64)
    n_bits = table_bits(keys.size)
    table = place(keys, np.full(100, (1 << n_bits) - 3), n_bits)
    assert sorted(table[table >= 0].tolist()) == list(range(100))


@pytest.mark.parametrize("module", [bytelevel, pretokenize])
def test_docstrings(module: ModuleType) -> None:
    """The examples in the documentation run."""
    assert doctest.testmod(module).failed == 0
