"""Small vocabularies of our own, and readers for the case files beside vocabularies.

`python -m tests.text.vocabularies` writes the fixtures in `data/` anew: a GGUF file with a
vocabulary trained on the text below, the inputs, and for each pre-tokenizer the expected ids.
The ids come from the plain twin; they were compared with llama.cpp when they were made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from ignis.gguf import GGUFWriter, open_gguf
from ignis.text import Tokenizer
from ignis.text.bpe import ByteLevelBPE, merge_plain
from ignis.text.bytelevel import BYTE_TO_CHARACTER, to_characters
from ignis.text.pretokenize import pre_tokenizer
from ignis.text.spm import SentencePieceBPE
from ignis.text.spm import merge_plain as merge_plain_pieces

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny.gguf"
TINY_PIECES = DATA / "tiny-spm.gguf"
SHARED = Path(__file__).parents[3] / "shared" / "vocab"
KINDS = ("gpt-2", "smollm", "qwen2", "llama-bpe", "falcon", "default", "deepseek-llm",
         "deepseek-coder")  # fmt: skip
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>", "</think>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
USER_DEFINED_PIECES = ("<think>", "</think>", "\n\n", "\n\n\n", "  ", "    ")
SEPARATOR = b"\n__ggml_vocab_test__\n"

_TEXT = """
The engine reads a model, compiles its graph and then writes one token after the other. Whoever
wants to know how a tokenizer works should train one: count the pairs, merge the most frequent,
and count again. I've done it, you'll see that it's quick; they don't need more than a page.
    def merge(symbols, pair):
        for i in range(len(symbols) - 1):
            if symbols[i] == pair[0] and symbols[i + 1] == pair[1]:
                return symbols[:i] + [pair[0] + pair[1]] + symbols[i + 2:]
        return symbols  # nothing to merge
    x += 10; y = 1000 * 123 + 456 - 7890; z = {"a": [1, 2, 3]}; print(f"{x} != {y}", end="\\n")
Die Äpfel fallen nicht weit vom Stamm; über Köln scheint die Sonne. Où est l'été? ¿Dónde está?
Съешь ещё этих мягких французских булок. Η γλώσσα είναι όμορφη. 我们在这里学习语言模型。我们学习。
これはトークンのテストです。한국어도 있습니다. नमस्ते दुनिया 🚀🚀 🦙.cpp ½ 3¾ ½ ٣٤
"""

INPUTS = (
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\t\n", " \n \n", "Hello world",
    " Hello world", "Hello, world!", "The tokenizer works.", "  merge the pairs  ",
    "I've seen that it's y'all'D and WE'LL, don't 'RE", "' era", "\n =", "!!!!!!", "3", "33",
    "333", "3333", "33333", "1234567890", " 12 345  6789 ", "x += 10; y = 1000",
    "if a == b:\n    c", "Äpfel über Köln", "É e\u0301 n\u0303", "Съешь ещё", "我们在这里学习",
    "한국어 있습니다",
    "🚀 (normal) 😶\u200d🌫️ ✅", "ied 4 ½ months", "a\u00a0b", "tab\tand\r\nlines \n\n end",
    "\x00\x01\x7f", "``''\"\" «q» “q” — $5.00 + 3 = <8>", "snake_case camelCase __init__",
    "<|im_start|>user", "<think>no</think>", "symbols symbols symbols", "ქართული Ꭰ ᾳ ｆｕｌｌ，。",
    "  \n\n  \t \t\n x", "a  b   c    d", "end ",
)  # fmt: skip


def train(text: str, n_merges: int) -> tuple[list[str], list[str]]:
    """Tokens and merge rules of a byte-level BPE vocabulary, the plain textbook way."""
    words = Counter(tuple(to_characters(piece.encode()))
                    for piece in pre_tokenizer("gpt-2").split(text))  # fmt: skip
    tokens, merges = sorted(BYTE_TO_CHARACTER), []
    for _ in range(n_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        tokens.append(left + right)
        merges.append(f"{left} {right}")
        words = Counter({_merged(word, left, right): n for word, n in words.items()})
    return list(dict.fromkeys(tokens)), merges


def _merged(word: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    result: list[str] = []
    for symbol in word:
        if result and (result[-1], symbol) == (left, right):
            result[-1] = left + right
        else:
            result.append(symbol)
    return tuple(result)


def train_pieces(text: str, n_merges: int) -> list[str]:
    """Pieces of a SentencePiece BPE vocabulary, the best first, then the single characters."""
    words = Counter(tuple(f"▁{word}") for word in text.split())
    words.update([tuple("▁" * 8)] * 9)  # runs of spaces merge with each other
    pieces = []
    for _ in range(n_merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        pieces.append(left + right)
        words = Counter({_merged(word, left, right): n for word, n in words.items()})
    letters = sorted({c for c in text if c.isalpha() or c == "," or c == "."} | {"▁"})
    return [*dict.fromkeys(pieces), *letters]


def write_pieces(
    path: Path,
    pieces: Sequence[str],
    byte_tokens: Sequence[str] = BYTES,
    user_defined: Sequence[str] = USER_DEFINED_PIECES,
    /,
    *,
    name: str = "pieces",
    **options: object,
) -> Path:
    """A SentencePiece GGUF file; `options` are further `tokenizer.ggml` keys, None leaves out."""
    writer = GGUFWriter(path, "llama")
    writer.add("general.name", name)
    special = ("<unk>", "<s>", "</s>", "<|end|>")
    texts = [*special, *byte_tokens, *pieces, *user_defined]
    n_first = len(special) + len(byte_tokens)
    kinds = [2, 3, 3, 3] + [6] * len(byte_tokens) + [1] * len(pieces) + [4] * len(user_defined)
    scores = [0.0] * n_first + [-float(i) for i in range(len(pieces))] + [0.0] * len(user_defined)
    values: dict[str, object] = {
        "model": "llama", "pre": "default", "tokens": texts, "token_type": kinds,
        "scores": np.array(scores, np.float32), "bos_token_id": 1, "eos_token_id": 2,
        "unknown_token_id": 0,
    }  # fmt: skip
    for key, value in (values | options).items():
        if value is not None:
            writer.add(f"tokenizer.ggml.{key}", value)
    writer.write()
    return path


def write_vocabulary(
    path: Path,
    tokens: Sequence[str],
    merges: Sequence[str],
    control: Sequence[str] = CONTROL,
    user_defined: Sequence[str] = USER_DEFINED,
    /,
    **options: object,
) -> Path:
    """A vocabulary-only GGUF file; `options` are further `tokenizer.ggml` keys, None leaves out."""
    writer = GGUFWriter(path, "llama")
    texts = [*tokens, *control, *user_defined]
    kinds = [1] * len(tokens) + [3] * len(control) + [4] * len(user_defined)
    values: dict[str, object] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": texts, "token_type": kinds, "merges": merges,
    }  # fmt: skip
    if control:
        values["bos_token_id"] = values["eos_token_id"] = len(tokens)
    for key, value in (values | options).items():
        if value is not None:
            writer.add(f"tokenizer.ggml.{key}", value)
    writer.add("tokenizer.chat_template", CHATML)
    writer.write()
    return path


def read_cases(inputs: Path, outputs: Path) -> Iterator[tuple[bytes, list[int]]]:
    """Inputs and expected ids, in the format of llama.cpp's vocabulary tests."""
    texts = inputs.read_bytes().split(SEPARATOR)
    if texts[-1] == b"":
        texts.pop()
    lines = outputs.read_text().split("\n")
    for text, line in zip(texts, lines, strict=False):
        yield text, [int(word) for word in line.split()]


def encode_plain(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """The ids by the plain twin: no machine code, no memory of words, no user-defined tokens."""
    model = tokenizer.model
    assert isinstance(model, ByteLevelBPE)
    table = model.table
    ids: list[int] = []
    for piece in model.pre.split(text.decode("utf-8", "surrogateescape")):
        data = piece.encode("utf-8", "surrogateescape")
        whole = tokenizer.vocabulary.find([to_characters(data).encode()])[0]
        ids += [whole] if model.pre.whole_words and whole >= 0 else merge_plain(data, table)
    return ids


@cache
def tiny_pieces() -> Tokenizer:
    """The committed SentencePiece vocabulary."""
    return Tokenizer.from_gguf(open_gguf(TINY_PIECES))


def encode_pieces_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids by the plain twin: no machine code, no cuts, no memory of words, nothing special."""
    model = tokenizer.model
    assert isinstance(model, SentencePieceBPE)
    prefix = "▁" if model.add_space_prefix else ""
    parts = re.split("([\udc80-\udcff])", prefix + text.replace(" ", "▁")) if text else []
    data = (part.encode("utf-8", "surrogateescape") for part in parts)
    return [token for part in data for token in merge_plain_pieces(part, model)]


@cache
def tiny(pre: str | None = None) -> Tokenizer:
    """The committed vocabulary."""
    return Tokenizer.from_gguf(open_gguf(TINY), pre)


def main() -> None:
    tokens, merges = train(_TEXT, 400)
    write_vocabulary(TINY, tokens, merges, CONTROL, ())
    write_pieces(TINY_PIECES, train_pieces(_TEXT, 300), BYTES, ())
    plain = (encode_pieces_plain(tiny_pieces(), text) for text in INPUTS)
    (DATA / "tiny.spm.out").write_text("".join(f"{' '.join(map(str, ids))}\n" for ids in plain))
    (DATA / "tiny.inp").write_bytes(b"".join(text.encode() + SEPARATOR for text in INPUTS))
    for kind in KINDS:
        tokenizer = Tokenizer.from_gguf(open_gguf(TINY), kind)
        lines = (" ".join(map(str, encode_plain(tokenizer, text.encode()))) for text in INPUTS)
        (DATA / f"tiny.{kind}.out").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
