"""Which of our pre-tokenizers cuts text as a `tokenizer.json` says.

The file describes steps: split at a pattern, set digits apart, split as GPT-2 did. They are
followed on a text that tells our pre-tokenizers from each other, and the one that cuts it the
same way is the answer. So it does not matter how a pattern is written.

    {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},
                                           {"type": "ByteLevel", "use_regex": true}]}  ->  "smollm"

Source: the documentation of Hugging Face's `tokenizers` (components, pre-tokenizers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import regex

from ignis.errors import TokenizerError
from ignis.text.pretokenize import all_kinds, gpt_2_pattern

_TIMEOUT_SECONDS = 5.0      # patterns come from untrusted files
_MARKS = r"[\p{P}$+<=>^`|~]"

# Contractions in any case, runs of digits, marks and white space, letters of many alphabets, next
# to each other in ways that some pre-tokenizer cuts differently.
PROBE = (
    "I've seen that it's y'all'D and WE'LL, don't 'RE 'ſ ' s\n\n\n \t\t x  y   z\r\n \r\n  end  \n"
    "1 12 123 1234 12345 1234567890 a1b22c333 x=10;y+=1000 3.14 $5.00 1,000,000 ½ ²³ ٣٤٥٦ Ⅷ\n"
    "!!! ??? ... --- <|im_start|> ``''\"\" «q» “q” (a) [b] {c} a_b camelCase __init__ #t @a ^~|\n"
    "def f(x):\n    return {'a': [1, 2]}\n\t\tif a != b: pass\n"
    "Äpfel über Köln Où est l'été ¿Dónde? Съешь ещё этих Η γλώσσα ქართული Ꭰ ᾳ ｆｕｌｌ，。！ नमस्ते\n"
    "我们在这里学习123。これはテスト 한국어도 있습니다 ไทย عربي e\u0301 n\u0303 a\u00a0b\u3000c"
    "🚀🚀🦙.cpp 😶\u200d🌫️ ✅ \x00\x01\x7f a\x85b\u2028c  "
)  # fmt: skip

_Step: TypeAlias = Callable[[str], Iterable[str]]


def recognize(steps: Any, whole_words: bool, where: object) -> str:
    """The GGUF name of the pre-tokenizer that a `pre_tokenizer` of tokenizer.json describes.

    `whole_words`: a piece that is a token is not merged (`ignore_merges`). Raises
    `TokenizerError` where none of ours cuts like it.
    """
    cut = _follow(steps, where)
    for kind in all_kinds():
        if kind.whole_words == whole_words and kind.split(PROBE) == cut:
            return kind.name
    raise TokenizerError("no pre-tokenizer here cuts text as this file says", where=where,
                         wanted="one like " + " or ".join(kind.name for kind in all_kinds()))


def _follow(steps: Any, where: object) -> list[str]:
    pieces = [PROBE]
    try:
        for step in _flat(steps):
            pieces = [part for piece in pieces for part in step(piece)]
    except (LookupError, TypeError, AttributeError, regex.error, TimeoutError) as error:
        raise TokenizerError(f"a pre_tokenizer that is not understood: {error}", where=where
                             ) from None
    return pieces


def _flat(steps: Any) -> Iterator[_Step]:
    """The steps of a description, sequences within sequences unrolled."""
    if steps["type"] == "Sequence":
        for inner in steps["pretokenizers"]:
            yield from _flat(inner)
    else:
        yield _STEPS[steps["type"]](steps)


def _split(step: Mapping[str, Any]) -> _Step:
    if step.get("invert"):
        raise LookupError("Split, inverted")
    written = step["pattern"]
    pattern = regex.escape(written["String"]) if "String" in written else written["Regex"]
    return _cutting(pattern, step["behavior"])


def _digits(step: Mapping[str, Any]) -> _Step:
    return _cutting(r"\p{N}", "Isolated" if step["individual_digits"] else "Contiguous")


def _punctuation(step: Mapping[str, Any]) -> _Step:
    return _cutting(_MARKS, step.get("behavior", "Isolated"))


def _byte_level(step: Mapping[str, Any]) -> _Step:
    if step.get("add_prefix_space"):
        raise LookupError("ByteLevel with add_prefix_space")
    if not step.get("use_regex", True):
        return lambda text: (text,)
    return _cutting(gpt_2_pattern(), "Isolated")


_STEPS: Mapping[str, Callable[[Mapping[str, Any]], _Step]] = {
    "Split": _split, "Digits": _digits, "Punctuation": _punctuation, "ByteLevel": _byte_level,
}  # fmt: skip


def _cutting(pattern: str, behavior: str) -> _Step:
    """Matches and what lies between them; "Contiguous" joins matches that touch."""
    if behavior not in ("Isolated", "Contiguous"):
        raise LookupError(f"behavior {behavior}")
    compiled = regex.compile(f"(?:{pattern})+" if behavior == "Contiguous" else pattern)

    def cut(text: str) -> Iterator[str]:
        end = 0
        for match in compiled.finditer(text, timeout=_TIMEOUT_SECONDS):
            if match.start() > end:
                yield text[end : match.start()]
            if match.group():
                yield match.group()
            end = match.end()
        if end < len(text):
            yield text[end:]

    return cut
