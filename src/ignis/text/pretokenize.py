"""Pre-tokenizers: where text is cut before byte pairs are merged, by their GGUF names.

llama.cpp describes each as a list of patterns that are applied one after the other: every piece
is cut at the matches of the next pattern, and what lies between two matches is a piece too. One
compiled expression splits ten times as fast as such a list, so here the patterns that see every
text are folded into one, `units`, whose matches tile the text; the few that may cut a unit further
stay a list, `then`, and only run on units that were not seen before.

In a folded pattern, "the piece ends here" is spelled out: `\\s+(?!\\S)` of a list that isolates
digits first becomes `\\s+(?![^\\s\\p{N}])`.

Source: the names, patterns and flags of llama.cpp's `llama-vocab.cpp` (facts only), which follow
the `tokenizer.json` of the models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from ignis.errors import TokenizerError

_CONTRACTION = r"'(?:s|t|re|ve|m|ll|d)"
_CONTRACTION_ANY_CASE = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"

_GPT_2 = rf" ?\p{{L}}+|{_CONTRACTION}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_SINGLE_DIGITS = (
    rf" ?\p{{L}}+|\p{{N}}|{_CONTRACTION}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"
)
_CL100K = (
    rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Runs of punctuation first, so no apostrophe is left for a contraction.
_PUNCTUATION_FIRST = (
    r" ?\p{L}+|[%s]+| ?\p{N}+| ?[^\s\p{L}\p{N}%s]+|\s+(?![^\s%s])|\s+"
)
_FALCON_MARKS, _DEFAULT_MARKS = r"\p{P}$+<=>\^~|`", r"\p{P}$+<=>\^~|"
# Numbers of code points, so that no editor can normalise them.
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    r"A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    r"\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    r"\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    r"\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    r"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    r"\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    r"\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    r"\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    r"\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    r"\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_WIDE = rf"(?=[^\x00-\x7f])[{_DEEPSEEK_LETTERS}]"  # the large class is slow to test
_DEEPSEEK_MARKS = r"!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"

_UNSURE_UNITS = 16  # more than any pattern looks ahead


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into the pieces that byte pairs are merged in.

    `whole_words`: a piece that is itself a vocabulary entry is that token, without merging.
    `add_bos`: models of this kind start with BOS unless the file says otherwise.
    """

    name: str
    units: str
    then: tuple[str, ...] = ()
    whole_words: bool = False
    add_bos: bool = False

    @cached_property
    def _units(self) -> Any:
        return regex.compile(self.units)

    @cached_property
    def _then(self) -> tuple[Any, ...]:
        return tuple(regex.compile(pattern) for pattern in self.then)

    def windows(self, text: str, size: int = 1 << 20) -> Iterable[list[str]]:
        """Cut the text into units, about `size` characters at a time; joined they are the text.

        The end of a window may cut its last units wrongly: a word in two, or white space that
        decides by what follows it. So they are cut again in the next window, which starts at a
        unit that nothing behind the end could have moved.
        """
        if len(text) <= size:
            return (self._units.findall(text),)
        return self._overlapping_windows(text, size)

    def _overlapping_windows(self, text: str, size: int) -> Iterator[list[str]]:
        begin, end = 0, size
        while end < len(text):
            units: list[str] = self._units.findall(text, begin, end)
            del units[-_UNSURE_UNITS:]
            while units and units[-1].isspace():
                units.pop()
            yield units
            # Nothing sure: one unit fills the window, so look at more.
            taken = sum(map(len, units))
            begin, end = begin + taken, begin + taken + size if taken else end + (end - begin)
        yield self._units.findall(text, begin)

    def split_unit(self, unit: str) -> list[str]:
        """Cut one unit into the final pieces."""
        pieces = [unit]
        for pattern in self._then:
            pieces = [part for piece in pieces for part in _cut(pattern, piece)]
        return pieces

    def split(self, text: str) -> list[str]:
        """Cut the text into the final pieces.

        >>> pre_tokenizer("gpt-2").split("You'll see  12 apples.")
        ['You', "'ll", ' see', ' ', ' 12', ' apples', '.']
        """
        units = [unit for window in self.windows(text) for unit in window]
        return [p for u in units for p in self.split_unit(u)] if self.then else units


def _cut(pattern: Any, text: str) -> Iterator[str]:
    """The matches of a pattern and what lies between them."""
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        yield match.group()
        end = match.end()
    if end < len(text):
        yield text[end:]


def _make_kinds() -> Iterator[PreTokenizer]:
    yield PreTokenizer("gpt-2", _GPT_2)
    yield PreTokenizer("smollm", _SINGLE_DIGITS)
    yield PreTokenizer("qwen2", _CL100K % "")
    yield PreTokenizer("llama-bpe", _CL100K % "{1,3}", whole_words=True, add_bos=True)
    yield PreTokenizer(
        "falcon", _PUNCTUATION_FIRST % ((_FALCON_MARKS,) * 3), then=("[0-9][0-9][0-9]",)
    )
    yield PreTokenizer(
        "default", _PUNCTUATION_FIRST % ((_DEFAULT_MARKS,) * 3),
        then=(r"\p{N}+", "[0-9][0-9][0-9]"),
    )  # fmt: skip
    yield PreTokenizer(
        "deepseek-llm",
        rf"[^\S\r\n]?(?:[A-Za-z]++|{_DEEPSEEK_WIDE})+|[\r\n]"
        rf"|(?:[!-@\[-`{{-~]++|[^\s{_DEEPSEEK_LETTERS}]|[^\S\r\n](?![A-Za-z]|{_DEEPSEEK_WIDE}))+",
        then=(rf"\s?[{_DEEPSEEK_MARKS}]+", r"\s+\Z", _CJK, r"\p{N}+"),
    )
    yield PreTokenizer(
        "deepseek-coder",
        r"[^\S\r\n]?\p{L}+|[\r\n]|[^\S\r\n]?\p{P}+"
        r"|(?:[^\s\p{L}\p{P}]++|[^\S\r\n](?![\p{L}\p{P}]))+",
        then=(_CJK, r"\p{N}"),
    )


_KINDS = {kind.name: kind for kind in _make_kinds()}
_ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe",
    "falcon-h1": "llama-bpe", "pixtral": "llama-bpe", "midm-2.0": "llama-bpe", "lfm2": "llama-bpe",
    "deepseek-r1-qwen": "qwen2", "megrez": "qwen2", "stablelm2": "qwen2", "hunyuan": "qwen2",
    "mpt": "gpt-2", "olmo": "gpt-2", "phi-2": "gpt-2", "jais": "gpt-2", "trillion": "gpt-2",
    "gigachat": "gpt-2", "a.x-4.0": "gpt-2", "mellum": "gpt-2", "exaone4": "gpt-2",
    "granite-docling": "gpt-2",
    "starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "codeshell": "smollm",
    "exaone": "smollm", "minerva-7b": "smollm",
}  # fmt: skip

def all_kinds() -> Iterable[PreTokenizer]:
    """Every way to cut that there is, once."""
    return _KINDS.values()


def gpt_2_pattern() -> str:
    """GPT-2's pattern, which byte-level tokenizers follow unless told otherwise."""
    return _GPT_2


NAMES: tuple[str, ...] = tuple(sorted((*_KINDS, *_ALIASES)))


def pre_tokenizer(name: str, where: object = None) -> PreTokenizer:
    """The pre-tokenizer that GGUF files call `name`; raises `TokenizerError` if there is none."""
    kind = _KINDS.get(_ALIASES.get(name, name))
    if kind is None:
        raise TokenizerError(
            "unknown pre-tokenizer", where=where, got=repr(name), wanted=" or ".join(NAMES),
            hint="choose one with --pre NAME if you know which it is like",
        )  # fmt: skip
    return kind
