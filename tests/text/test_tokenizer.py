"""The tokenizer as a whole: round trips, special tokens, streaming, broken files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ignis.errors import IgnisError, ModelFileError, TokenizerError, UnsupportedModelError
from ignis.gguf import open_gguf
from ignis.text import StreamDecoder, Tokenizer
from tests.text.vocabularies import CONTROL, KINDS, encode_plain, tiny, train, write_vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary with user-defined tokens, some of which look like control tokens."""
    tokens, merges = train("think about the tokens, then think again", 40)
    path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
    write_vocabulary(path, tokens, merges, CONTROL, ("<think>", "<thinking>", "<|odd|>"))
    return Tokenizer.from_gguf(open_gguf(path))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_random_text_comes_back(kind: str, text: str) -> None:
    """Any text survives, and the fast path agrees with the plain one."""
    ids = tiny(kind).encode(text)
    assert tiny(kind).decode(ids) == text
    assert ids == encode_plain(tiny(kind), text.encode())


@settings(max_examples=300, deadline=None)
@given(data=st.binary())
def test_random_bytes_come_back(data: bytes) -> None:
    """Bytes that are not UTF-8 are encoded as they are."""
    ids = tiny().encode(data)
    assert b"".join(map(tiny().token_bytes, ids)) == data
    assert tiny().decode(ids) == data.decode("utf-8", "replace")


@given(text=st.text(st.characters(), max_size=10))
def test_surrogates(text: str) -> None:
    """A lone surrogate is no character: U+FFFD, or the byte that the command line meant by it."""
    raw = b"".join(map(tiny().token_bytes, tiny().encode(text)))
    assert raw.decode("utf-8", "replace") is not None
    assert tiny().encode("\udcff\udcc3\udca4") == tiny().encode(b"\xff\xc3\xa4")
    assert tiny().encode("\ud800") == tiny().encode("\ufffd")


def test_special_tokens_only_in_trusted_text(tokenizer: Tokenizer) -> None:
    """Control tokens need `special`; user-defined ones do not, unless they look like control."""
    start, end = (tokenizer.encode(t, special=True)[0] for t in CONTROL[1:])
    text = f"{CONTROL[1]}then{CONTROL[2]}"
    assert tokenizer.encode(text, special=True) == [start, *tokenizer.encode("then"), end]
    assert not any(map(tokenizer.is_control, tokenizer.encode(text)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, special=True)) == "then"
    assert tokenizer.decode(tokenizer.encode(text, special=True), skip_special=False) == text
    assert len(tokenizer.encode("<think>")) == 1
    assert len(tokenizer.encode("<thinking>")) == 1, "the longest of the leftmost"
    assert len(tokenizer.encode("<|odd|>")) > 1
    assert len(tokenizer.encode("<|odd|>", special=True)) == 1


def test_bos_and_eos_as_the_file_says(tmp_path: Path) -> None:
    """The switches of the file win over what its pre-tokenizer suggests."""
    tokens, merges = train("abc", 1)

    def ends(name: str, **options: object) -> list[int]:
        path = write_vocabulary(tmp_path / f"{name}.gguf", tokens, merges, **options)
        tokenizer = Tokenizer.from_gguf(open_gguf(path))
        assert tokenizer.encode("") == []
        return tokenizer.encode("", add_special=True)

    one = [len(tokens)]
    assert ends("silent") == []
    assert ends("llama", pre="llama-bpe") == one
    assert ends("off", pre="llama-bpe", add_bos_token=False) == []
    assert ends("both", add_bos_token=True, add_eos_token=True) == one * 2
    assert ends("none", add_bos_token=True, bos_token_id=None) == []


def test_stop_ids() -> None:
    """A reply ends at EOS and at the tokens known to end one."""
    assert {tiny().vocabulary.text_at(i) for i in tiny().stop_ids} == {
        "<|endoftext|>", "<|im_end|>",
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(data=st.binary() | st.text().map(lambda t: t.encode("utf-8", "replace")))
def test_stream_equals_whole(data: bytes) -> None:
    """Byte by byte: every piece is whole characters, and together they are the text."""
    ids = [tiny().encode(bytes((byte,)))[0] for byte in data]
    stream = StreamDecoder(tiny())
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == data.decode("utf-8", "replace")
    for piece in pieces:
        piece.encode()  # a lone surrogate would raise


def test_stream_waits_for_the_character() -> None:
    """Half a character is held back, a broken one shown as soon as it is known to be broken."""
    stream, byte = StreamDecoder(tiny()), lambda b: tiny().encode(bytes((b,)))[0]
    assert [stream.push(byte(b)) for b in "é🦙".encode()] == ["", "é", "", "", "", "🦙"]
    assert [stream.push(byte(b)) for b in b"\xf0\x9fA"] == ["", "", "\ufffdA"]
    assert stream.push(tiny().encode("<|im_end|>", special=True)[0]) == ""
    assert (stream.push(byte(0xC3)), stream.flush(), stream.flush()) == ("", "\ufffd", "")


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_no_such_token(token_id: int) -> None:
    """An id outside the vocabulary is an error, not another token."""
    with pytest.raises(TokenizerError, match="no such token"):
        tiny().token_bytes(token_id)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": "bert"}, UnsupportedModelError, "WordPiece"),
        ({"model": "t5"}, UnsupportedModelError, "'t5'"),
        ({"model": "llama"}, TokenizerError, "scores"),
        ({"model": None}, ModelFileError, "tokenizer.ggml.model"),
        ({"pre": "new"}, TokenizerError, "--pre"),
        ({"tokens": None}, ModelFileError, "tokens"),
        ({"tokens": [1, 2]}, ModelFileError, "tokens"),
        ({"merges": None}, ModelFileError, "merges"),
        ({"token_type": [1, 1]}, TokenizerError, "token_type"),
        ({"token_type": [1.0] * 260}, TokenizerError, "token_type"),
        ({"eos_token_id": 10**6}, TokenizerError, "eos_token_id"),
        ({"eos_token_id": "x"}, ModelFileError, "eos_token_id"),
        ({"add_bos_token": 3}, ModelFileError, "add_bos_token"),
        ({"tokens": ["a" * (1 << 17)], "token_type": None}, TokenizerError, "too long"),
    ],
)
def test_broken_files(
    tmp_path: Path, options: dict[str, Any], error: type[IgnisError], text: str
) -> None:
    """What a file gets wrong is named, in one line."""
    tokens, merges = train("abc", 1)
    control = () if "tokens" in options else CONTROL
    path = write_vocabulary(tmp_path / "broken.gguf", tokens, merges, control, (), **options)
    with pytest.raises(error) as caught:
        Tokenizer.from_gguf(open_gguf(path))
    assert text in str(caught.value) and "broken.gguf" in str(caught.value)


def test_pre_overrides_the_file(tmp_path: Path) -> None:
    """`--pre` helps where the file names something unknown."""
    tokens, merges = train("abc", 1)
    path = write_vocabulary(tmp_path / "new.gguf", tokens, merges, pre="brand-new")
    assert Tokenizer.from_gguf(open_gguf(path), "qwen2").encode("bc") == [len(tokens) - 1]
    with pytest.raises(TokenizerError, match="--pre: unknown"):
        Tokenizer.from_gguf(open_gguf(path), "newer")


def test_remembered_words_are_bounded() -> None:
    """A stream of ever new words does not fill memory, and stays right."""
    tokenizer, rng = Tokenizer(tiny().vocabulary, tiny("qwen2").model), random.Random(3)
    for _ in range(3):
        text = " ".join(str(rng.random())[2:].translate(str.maketrans("0123456789", "abcdefghij"))
                        for _ in range(25_000))  # fmt: skip
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.model._remembered) <= 1 << 15
