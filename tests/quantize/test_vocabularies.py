"""If these fail, a converted checkpoint reads text as other tokens than it was trained on."""

from __future__ import annotations

import json
import random
from struct import pack

import pytest

from ignis.errors import IgnisError, TokenizerError
from ignis.gguf import GGUFWriter, open_gguf
from ignis.quantize.hf.vocabulary import read_vocabulary
from ignis.text import Tokenizer
from ignis.text.pretokenize import all_kinds
from ignis.text.recognize import PROBE, recognize
from tests.quantize.checkpoints import byte_level, sequence, split, tokenizer_json, write_json
from tests.text.vocabularies import INPUTS, tiny, tiny_pieces

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
DIGITS = {"type": "Digits", "individual_digits": True}
DEEPSEEK_CODER = sequence(
    split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"),
    split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), DIGITS, byte_level(False))
# Pre-tokenizers as the files of models describe them, and their names.
DESCRIBED = {
    "gpt-2": byte_level(True),
    "smollm": sequence(DIGITS, byte_level(True)),
    "qwen2": sequence(split(QWEN2), byte_level(False)),
    "llama-bpe": sequence(split(LLAMA3), byte_level(False)),
    "deepseek-coder": DEEPSEEK_CODER,
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint's folder with a byte-level tokenizer."""
    write_json(tmp_path / "tokenizer.json", tokenizer_json())
    write_json(tmp_path / "tokenizer_config.json",
               {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"})
    write_json(tmp_path / "config.json", {"eos_token_id": 658})
    return tmp_path


def tokenizer_of(folder, n_vocab=700):
    """The tokenizer of a GGUF file with the keys that are read, and those keys."""
    keys = read_vocabulary(folder, n_vocab)
    writer = GGUFWriter(folder / "vocabulary.gguf", "llama")
    for key, value in keys.items():
        writer.add(key, value)
    writer.write()
    return Tokenizer.from_gguf(open_gguf(folder / "vocabulary.gguf")), keys


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("kind", DESCRIBED)
def test_byte_level_texts_become_the_same_tokens(kind, pairs, folder):
    """Against the same vocabulary under the pre-tokenizer's name."""
    write_json(folder / "tokenizer.json", tokenizer_json(
        DESCRIBED[kind], pairs=pairs, ignore_merges=kind == "llama-bpe"))
    tokenizer, keys = tokenizer_of(folder)
    assert keys["tokenizer.ggml.pre"] == kind
    for text in INPUTS:
        for special in (False, True):
            assert tokenizer.encode(text, special=special) \
                == tiny(kind).encode(text, special=special), text


def test_all_pre_tokenizers_cut_the_probe_differently():
    """Or recognizing one would be a guess."""
    cuts = [tuple(kind.split(PROBE)) for kind in all_kinds()]
    assert len(set(cuts)) == len(cuts)


@pytest.mark.parametrize(("steps", "whole_words", "complaint"), [
    (sequence(split(LLAMA3), byte_level(False)), False, "no pre-tokenizer here cuts"),
    (sequence(split(QWEN2), byte_level(False)), True, "no pre-tokenizer here cuts"),
    (sequence(split(r"\w+"), byte_level(False)), False, "no pre-tokenizer here cuts"),
    (split("("), False, "not understood"),
    ({**split("x"), "behavior": "Removed"}, False, "not understood: behavior Removed"),
    ({**split("x"), "invert": True}, False, "not understood"),
    ({"type": "ByteLevel", "add_prefix_space": True}, False, "add_prefix_space"),
    ({"type": "Whitespace"}, False, "not understood: 'Whitespace'"),
    ({}, False, "not understood"), (None, False, "not understood"), ([1], False, "not understood"),
])  # fmt: skip
def test_a_pre_tokenizer_that_nobody_knows_is_refused(steps, whole_words, complaint):
    """Never guessed: the text would be read as other tokens."""
    with pytest.raises(TokenizerError, match=complaint):
        recognize(steps, whole_words, "tokenizer.json")


def test_a_pattern_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr("ignis.text.recognize._TIMEOUT_SECONDS", 0.05)
    with pytest.raises(TokenizerError, match="not understood"):
        recognize(split(r"(?:[\s\S]+){9}[\ue000-\uf8ff]"), False, "tokenizer.json")


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: bytes | int | float) -> bytes:
    """One field of a protocol buffer."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + pack("<f", value)
    return varint(number << 3) + varint(value)


def piece_model(model_type: int = 2, prefix: bool = True) -> bytes:
    """The committed SentencePiece vocabulary as a tokenizer.model."""
    model = tiny_pieces()
    scores = model.model.scores
    pieces = (field(1, field(1, model.vocabulary.bytes_at(i).replace(b"  ", "▁▁".encode()))
                    + field(2, float(scores[i])) + field(3, int(model.vocabulary.kinds[i])))
              for i in range(model.n_vocab))
    return (b"".join(pieces) + field(2, field(3, model_type) + field(35, 1))
            + field(3, field(1, b"identity") + field(3, int(prefix))))


@pytest.mark.parametrize("source", ["tokenizer.model", "tokenizer.json"])
def test_sentencepiece_texts_become_the_same_tokens(source, tmp_path):
    """From the protocol buffer, scores and all; and from merges, which say as much."""
    model = tiny_pieces()
    if source == "tokenizer.model":
        (tmp_path / source).write_bytes(piece_model())
    else:
        write_json(tmp_path / source, json_of_pieces(model))
    write_json(tmp_path / "config.json", {"bos_token_id": 1, "eos_token_id": [2, 3]})
    tokenizer, keys = tokenizer_of(tmp_path, model.n_vocab + 5)
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"]
    assert keys["tokenizer.ggml.tokens"][-1] == f"[PAD{model.n_vocab + 4}]"
    assert (tokenizer.bos_id, tokenizer.eos_id, keys["tokenizer.ggml.eot_token_id"]) == (1, 2, 3)
    assert keys["tokenizer.ggml.unknown_token_id"] == 0
    for text in (*INPUTS, PROBE):
        assert tokenizer.encode(text) == model.encode(text), text


def json_of_pieces(model: Tokenizer) -> dict:
    """As converters write it: each piece's merges, the best piece first."""
    texts = [model.vocabulary.text_at(i) for i in range(model.n_vocab)]
    known = set(texts)
    best_first = sorted(range(len(texts)), key=lambda i: -model.model.scores[i])
    normal = [texts[i] for i in best_first if model.vocabulary.kinds[i] == 1]
    merges = [[text[:k], text[k:]] for text in normal for k in range(1, len(text))
              if text[:k] in known and text[k:] in known]
    special = [{"id": i, "content": texts[i], "special": True} for i in range(4)]
    space = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    return {"model": {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "merges": merges,
                      "vocab": {text: i for i, text in enumerate(texts)}},
            "normalizer": space, "pre_tokenizer": None, "added_tokens": special}  # fmt: skip


@pytest.mark.parametrize(("said", "adds"), [
    ({"tokenizer_config.json": {"add_prefix_space": False}}, False),
    ({"tokenizer.json": {"normalizer": {"type": "Replace"}}}, False),
    ({"tokenizer.json": {"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}}}, True),
    ({"tokenizer.json": {"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "never"}}},
     False),
    ({}, False),
])  # fmt: skip
def test_the_space_before_a_text_is_where_the_files_say(said, adds, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(piece_model(prefix=False))
    for name, value in said.items():
        write_json(tmp_path / name, value)
    keys = read_vocabulary(tmp_path, 1000)
    assert keys["tokenizer.ggml.add_space_prefix"] is adds


def test_added_tokens_are_what_the_files_say(folder):
    """Special ones steer, and those that look special; others stand for themselves in any text."""
    tokens = tokenizer_json()
    tokens["added_tokens"] += [
        {"id": 660, "content": "<think>", "special": False},
        {"id": 661, "content": "<|tool|>", "special": False},
        {"id": 900, "content": "<image>", "special": True}]
    write_json(folder / "tokenizer.json", tokens)
    write_json(folder / "added_tokens.json", {"<extra>": 662, "<|endoftext|>": 656})
    tokenizer, keys = tokenizer_of(folder)
    kinds = keys["tokenizer.ggml.token_type"]
    assert [int(kinds[i]) for i in (656, 660, 661, 662, 663)] == [3, 4, 3, 4, 5]
    assert len(keys["tokenizer.ggml.tokens"]) == 700
    assert tokenizer.encode("<think>") == [660] and 661 not in tokenizer.encode("<|tool|>")
    assert tokenizer.encode("<|tool|>", special=True) == [661]


def test_the_ends_of_a_reply_are_all_those_that_are_named(folder):
    write_json(folder / "generation_config.json", {"eos_token_id": [658, 657, 656, 9999]})
    tokenizer, keys = tokenizer_of(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (656, 658)
    assert (keys["tokenizer.ggml.eot_token_id"], keys["tokenizer.ggml.eom_token_id"]) == (657, 656)
    assert tokenizer.stop_ids >= {656, 657, 658}


def template(first=None, last=None):
    """A post-processor that puts tokens around the text."""
    tokens = [{"SpecialToken": {"id": name, "type_id": 0}} if name else None
              for name in (first, last)]
    single = [tokens[0], {"Sequence": {"id": "A", "type_id": 0}}, tokens[1]]
    inner = {"type": "TemplateProcessing", "single": [step for step in single if step]}
    return {"type": "Sequence", "processors": [byte_level(True), inner]}


@pytest.mark.parametrize(("processor", "config", "adds"), [
    (None, {}, (False, False)),
    (template("<|endoftext|>"), {}, (True, False)),
    (template("<|endoftext|>", "<|im_end|>"), {}, (True, True)),
    (template("<|endoftext|>"), {"add_bos_token": False}, (False, False)),
    (None, {"add_bos_token": True, "add_eos_token": None}, (True, False)),
])  # fmt: skip
def test_what_goes_around_a_text(processor, config, adds, folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | config)
    write_json(folder / "tokenizer.json", {**tokenizer_json(), "post_processor": processor})
    tokenizer, _ = tokenizer_of(folder)
    assert (tokenizer.add_bos, tokenizer.add_eos) == adds


def test_the_chat_template_comes_from_where_it_is(folder):
    """A file of its own goes first; a list has names."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert "tokenizer.chat_template" not in read_vocabulary(folder, 700)
    write_json(folder / "chat_template.json", {"chat_template": "old"})
    assert read_vocabulary(folder, 700)["tokenizer.chat_template"] == "old"
    write_json(folder / "tokenizer_config.json", {**settings, "chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]})
    keys = read_vocabulary(folder, 700)
    assert keys["tokenizer.chat_template"] == "plain"
    assert keys["tokenizer.chat_template.tool_use"] == "tools"
    assert keys["tokenizer.chat_templates"] == ["tool_use"]
    (folder / "chat_template.jinja").write_text("newest é", encoding="utf-8")
    assert read_vocabulary(folder, 700)["tokenizer.chat_template"] == "newest é"


def bad(**changes):
    return {**tokenizer_json(), **changes}


@pytest.mark.parametrize(("description", "complaint"), [
    (bad(model={"type": "WordPiece", "vocab": {"a": 0}}), "not supported: got 'WordPiece'"),
    (bad(model={"type": "Unigram", "vocab": []}), "not supported: got 'Unigram'"),
    (bad(model={"type": "BPE", "vocab": {}}), "the vocabulary is empty"),
    (bad(model={"type": "BPE", "vocab": {"a": 0, "b": 0}}), "bad vocabulary"),
    (bad(model={"type": "BPE", "vocab": {"a": "0"}}), "bad vocabulary"),
    (tokenizer_json(merges=["a b c"]), "bad merge rule: got 'a b c'"),
    (tokenizer_json(merges=[["a", 1]]), "bad merge rule"),
    (tokenizer_json(end_of_word_suffix="</w>"), "unsupported end_of_word_suffix"),
    (bad(decoder={"type": "Metaspace"}), "got a decoder 'Metaspace'"),
    (bad(decoder=None), "not supported"),
    (bad(normalizer={"type": "Lowercase"}), "unsupported normalizer: got Lowercase"),
    (bad(added_tokens=[{"id": "x", "content": "a"}]), "bad added token"),
    (bad(added_tokens=[{"id": 1}]), "bad added tokens"),
    (bad(post_processor=template("[CLS]")), "unsupported post_processor: got '\\[CLS\\]'"),
    ([], "not a JSON object: got list"),
])  # fmt: skip
def test_a_tokenizer_json_that_cannot_be_used_is_refused(description, complaint, folder):
    write_json(folder / "tokenizer.json", description)
    with pytest.raises(IgnisError, match=complaint):
        read_vocabulary(folder, 700)


@pytest.mark.parametrize(("data", "complaint"), [
    (b"", "not a SentencePiece model"), (b"version https://git-lfs", "not a SentencePiece model"),
    (piece_model(1), "not supported: got unigram, wanted BPE"),
    (field(1, field(1, b"a") + field(3, 9)), "not a SentencePiece model"),
])  # fmt: skip
def test_a_tokenizer_model_that_cannot_be_used_is_refused(data, complaint, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match=complaint):
        read_vocabulary(tmp_path, 1000)


def test_more_tokens_than_the_embedding_has_rows(folder):
    with pytest.raises(TokenizerError, match="more tokens than rows of the embedding: got 65"):
        read_vocabulary(folder, 100)


def test_mutated_protocol_buffers_end_in_one_line(tmp_path):
    """Every short prefix and 400 random changes: an error of ours, or a vocabulary."""
    rng, data = random.Random(0), piece_model()[:2000]
    path, n_refused = tmp_path / "tokenizer.model", 0
    for i in range(700):
        changed = bytearray(data if i >= 300 else data[:i])
        for _ in range(rng.randint(1, 4) if i >= 300 else 0):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            read_vocabulary(tmp_path, 400)
        except IgnisError as error:
            assert "\n" not in str(error)
            n_refused += 1
    assert n_refused > 200
