"""SentencePiece vocabularies: machine code against its twins, special pieces, broken files."""

from __future__ import annotations

import doctest
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ignis.errors import TokenizerError
from ignis.gguf import open_gguf
from ignis.kernels.bpe import scratch_nbytes
from ignis.kernels.eager import run_eager
from ignis.kernels.spm import PADDING_NBYTES, merge_pieces
from ignis.text import StreamDecoder, Tokenizer, partition
from ignis.text.partition import Partition, any_of
from ignis.text.spm import SentencePieceBPE, merge_plain
from tests.text.vocabularies import encode_pieces_plain, tiny_pieces, write_pieces

VALID = st.characters(exclude_categories=["Cs"])
TEXTS = st.text("abcdeinorst ▁é我\n", max_size=60) | st.text(VALID)
BROKEN = st.lists(st.sampled_from(["é".encode(), b"\xf0", b" ", b"the"])).map(b"".join)


def model_of(tokenizer: Tokenizer) -> SentencePieceBPE:
    assert isinstance(tokenizer.model, SentencePieceBPE)
    return tokenizer.model


def written(path: Path, *args: Any, **options: Any) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(write_pieces(path / "v.gguf", *args, **options)))


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_random_text_comes_back(text: str) -> None:
    """Any text survives, and cuts, memory and machine code change nothing."""
    ids = tiny_pieces().encode(text)
    assert tiny_pieces().decode(ids) == text.replace("▁", " ")
    assert ids == encode_pieces_plain(tiny_pieces(), text)


@settings(max_examples=200, deadline=None)
@given(data=st.binary() | BROKEN)
def test_random_bytes_come_back(data: bytes) -> None:
    """Bytes that are not UTF-8 are encoded as they are."""
    ids, text = tiny_pieces().encode(data), data.decode("utf-8", "surrogateescape")
    assert ids == encode_pieces_plain(tiny_pieces(), text)
    back = b"".join(map(tiny_pieces().token_bytes, ids))
    assert back.removeprefix(b" ") == data if data else not ids


def test_native_equals_eager() -> None:
    """The same kernel body on NumPy, with every memory access checked."""
    model = model_of(tiny_pieces())
    words = [w.encode() for w in ("▁the▁engine", "x", "▁", "▁▁▁▁▁▁▁", "▁我们é🦙", "symbols" * 4)]
    words.append(b"\xf0\x9f")
    offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    longest = max(map(len, words))
    out, counts = np.zeros(int(offsets[-1]), np.int32), np.zeros(len(words), np.int32)
    index = model.vocabulary.index
    args = {
        "text": np.frombuffer(b"".join(words) + bytes(PADDING_NBYTES), np.uint8).copy(),
        "offsets": offsets, "hashes": index.hashes, "table": index.table, "n_bits": index.n_bits,
        "ranks": model.ranks, "longest": model.vocabulary.longest_token,
        "byte_tokens": model.byte_tokens, "split": 1, "capacity": longest, "out": out,
        "counts": counts,
    }  # fmt: skip
    run_eager(merge_pieces(), args, 0, len(words), np.zeros(scratch_nbytes(longest), np.uint8))
    flat = [token for word in model.merge(words) for token in word]
    assert out[: counts.sum()].tolist() == flat
    assert flat == [token for word in words for token in merge_plain(word, model)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_pieces(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Equal scores, either zero, infinities, gaps in the pieces, `▁` anywhere: the plain result."""
    rng = random.Random(seed)
    alphabet = "abé▁"
    pieces = {"".join(rng.choices(alphabet, k=rng.randrange(1, 12))) for _ in range(40)}
    pieces |= {a + b for a in alphabet for b in alphabet if rng.random() < 0.7}
    scores = rng.choices([0.0, -0.0, 1.5, -1.5, -1e30, -np.inf, np.inf, 1e-40], k=len(pieces) + 260)
    tokenizer = written(
        tmp_path_factory.mktemp("pieces"), sorted(pieces), (), (),
        add_space_prefix=rng.random() < 0.5, scores=np.array(scores[: len(pieces) + 4], np.float32),
    )  # fmt: skip
    for _ in range(20):
        text = "".join(rng.choice("abé xy") for _ in range(rng.randrange(1, 40)))
        assert tokenizer.encode(text) == encode_pieces_plain(tokenizer, text), text


@pytest.mark.parametrize("kind", ["one letter", "random letters", "spaces"])
def test_worst_inputs_are_near_linear(kind: str) -> None:
    """A megabyte without a place to cut is no trap."""
    letters = {"one letter": "e", "random letters": "abcdefghijklmnopqrstuvwxyz", "spaces": " "}
    text = "".join(random.Random(1).choices(letters[kind], k=1_000_000))
    tiny_pieces().encode("warm")
    started = time.process_time()
    ids = tiny_pieces().encode(text)
    assert time.process_time() - started < 2
    assert tiny_pieces().decode(ids) == text


def test_space_prefix(tmp_path: Path) -> None:
    """A space stands before each text after a special token; decoding takes the first away."""
    tokenizer = written(tmp_path, ["▁", "a", "▁a"])
    a, bos = tokenizer.vocabulary.find(["▁a".encode()])[0], 1
    assert tokenizer.encode("") == []
    assert tokenizer.encode("", add_special=True) == [bos]
    assert tokenizer.encode("a", add_special=True) == [bos, a]
    assert tokenizer.encode("a<s>a", special=True) == [a, bos, a]
    assert tokenizer.decode([a, a]) == "a a"
    assert tokenizer.decode([bos, a]) == " a", "as llama.cpp: only the very first token"
    assert tokenizer.decode([bos, a], skip_special=False) == "<s> a"
    plain = written(tmp_path, ["▁", "a", "▁a"], add_space_prefix=False)
    assert plain.decode(plain.encode("a")) == "a" and plain.encode(" a") == [a]
    assert plain.decode([a]) == " a"


def test_stream(tmp_path: Path) -> None:
    """Bytes wait for their character; the first space goes only at the start of a text."""
    tokenizer = written(tmp_path, ["▁", "a"])
    ids = tokenizer.encode("é🦙 a")
    for start in (True, False):
        stream = StreamDecoder(tokenizer, start_of_text=start)
        pieces = [stream.push(i) for i in ids]
        first = "" if start else " "
        assert pieces == [first, "", "é", "", "", "", "🦙", " ", "a"]
        assert stream.flush() == ""
    stream = StreamDecoder(tokenizer)
    stream.push(tokenizer.vocabulary.find([b"<0xF0>"])[0])
    assert stream.flush() == "\ufffd"


def test_text_never_becomes_special(tmp_path: Path) -> None:
    """Not even where pieces would merge to a control token, a byte token or the unknown token."""
    names = ("<s>", "</s>", "<unk>", "<|end|>", "<0xA1>")
    heads = {name[:n] for name in names for n in range(1, len(name))}
    parts = sorted(heads | set("".join(names)) | {"▁"})
    tokenizer = written(tmp_path, parts)
    for text in names:
        ids = tokenizer.encode(text)
        assert len(ids) > 1 and not any(map(tokenizer.is_control, ids))
        assert tokenizer.decode(ids) == text
        if text != "<0xA1>":
            assert len(tokenizer.encode(text, special=True)) == 1


def test_user_defined_pieces_come_first(tmp_path: Path) -> None:
    """They are cut out of any text before spaces are escaped, the longest of the leftmost."""
    tokenizer = written(tmp_path, ["▁", "a", "\n"], add_space_prefix=False)
    ids = tokenizer.encode("a<think>     \n\n\n\n\na")
    spelled = [tokenizer.token_bytes(i).decode() for i in ids]
    assert spelled == ["a", "<think>", "    ", " ", "\n\n\n", "\n\n", "a"]


def test_unknown_characters(tmp_path: Path) -> None:
    """Without byte tokens a character that is no piece is one unknown token."""
    tokenizer = written(tmp_path, ["▁", "a"], ())
    space, a = tokenizer.vocabulary.find(["▁".encode(), b"a"])
    assert tokenizer.encode("aé🦙a") == [space, a, 0, 0, a]
    some = written(tmp_path, ["▁", "a"], ("<0xC3>",))
    assert some.encode("é")[1:] == [4, 0], "a missing byte alone is unknown"
    assert some.decode([4, 4]) == "\ufffd\ufffd"


def test_default_special_ids(tmp_path: Path) -> None:
    """SentencePiece numbers unknown, BOS and EOS first, so files need not name them."""
    unnamed: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id"))
    tokenizer = written(tmp_path, ["a"], **unnamed)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocabulary.unknown_id) == (1, 2, 0)
    assert tokenizer.add_bos and not tokenizer.add_eos
    none = written(tmp_path, ["a"], bos_token_id=np.uint32(0xFFFFFFFF))
    assert none.bos_id is None and not none.add_bos


def test_phi_3_swallows_white_space(tmp_path: Path) -> None:
    """Its special tokens, but for three, take the white space behind them; no file says so."""
    pieces = ["▁", "a", "▁a", "\n"]
    phi = written(tmp_path, pieces, name="Phi-3-mini")
    end, a = phi.encode("<|end|>", special=True)[0], phi.encode("a")
    assert phi.encode("<|end|> \n\t a", special=True) == [end, *a]
    assert phi.encode("<|end|> \n", special=True) == [end]
    assert phi.encode(" \n a", after=end) == a
    assert len(phi.encode("<s> a", special=True)) == 3
    other = written(tmp_path, pieces)
    assert len(other.encode("<|end|> \na", special=True)) > 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scores": None}, "scores: scores are missing"),
        ({"scores": np.zeros(3, np.float32)}, "got 3 of float32"),
        ({"scores": np.zeros(267, np.int32)}, "267 of int32"),
        ({"scores": np.full(267, np.nan, np.float32)}, "NaN for token 0"),
        ({"unknown_token_id": np.uint32(0xFFFFFFFF), "n_bytes": 3}, "no <0x03>"),
    ],
)
def test_broken_files(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    """What a file gets wrong is named, in one line."""
    byte_tokens = tuple(f"<0x{b:02X}>" for b in range(options.pop("n_bytes", 256)))
    with pytest.raises(TokenizerError) as caught:
        written(tmp_path, ["a"], byte_tokens, **options)
    assert text in str(caught.value) and "v.gguf" in str(caught.value)


def test_no_pre_tokenizer(tmp_path: Path) -> None:
    """`--pre` would have no effect, so it is refused."""
    with pytest.raises(TokenizerError, match="--pre"):
        Tokenizer.from_gguf(open_gguf(write_pieces(tmp_path / "v.gguf", ["a"])), "qwen2")


@settings(max_examples=200, deadline=None)
@given(words=st.sets(st.text("ab<|\n", min_size=1, max_size=70), min_size=1), seed=st.integers())
def test_any_of(words: set[str], seed: int) -> None:
    """The tree of prefixes matches the longest word."""
    pattern, rng = re.compile(any_of(words)), random.Random(seed)
    for word in words:
        text = word + "".join(rng.choices("ab<|\n", k=rng.randrange(4)))
        longest = max((w for w in words if text.startswith(w)), key=len)
        found = pattern.match(text)
        assert found is not None and found.group() == longest


def test_many_special_tokens(tmp_path: Path) -> None:
    """Six thousand control tokens, and text that nearly is one everywhere: still in a moment."""
    control = [f"<unused{i}>" for i in range(6000)]
    tokenizer = written(tmp_path, ["a"], (), ["\n" * n for n in range(1, 200)] + control)
    text = "<unused" * 50_000 + "<unused5999>" + "\n" * 150
    split = Partition(tokenizer.vocabulary, tokenizer.vocabulary.user_defined_ids).split
    started = time.process_time()
    pieces = list(split(text))
    assert time.process_time() - started < 1
    assert len(pieces) == 3


def test_docstrings() -> None:
    """The examples in the documentation run."""
    assert doctest.testmod(partition).failed == 0
