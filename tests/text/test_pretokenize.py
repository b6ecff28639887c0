"""Pre-tokenizers: the folded patterns against the lists of patterns they stand for."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from ignis.errors import TokenizerError
from ignis.text import pretokenize
from ignis.text.pretokenize import pre_tokenizer
from tests.text.vocabularies import KINDS

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CL100K = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
LETTERS = pretokenize._DEEPSEEK_LETTERS
# What llama.cpp applies one after the other, each to the pieces that the ones before left.
STAGES = {
    "gpt-2": [GPT_2],
    "smollm": [r"\p{N}", GPT_2],
    "qwen2": [CL100K % r"\p{N}"],
    "llama-bpe": [CL100K % r"\p{N}{1,3}"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "deepseek-llm": [
        r"[\r\n]", rf"\s?[{LETTERS}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
        CJK, r"\p{N}+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"],
}  # fmt: skip
TEXTS = st.lists(
    st.sampled_from([
        " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'", "a", "Word", "word", "1", "12", "1234",
        "½", "٣", ".", ",", "!?", "$", "=", "+=", "`", "|", "^", "(", "我们", "가나", "é",
        "e\u0301", "Ω", "ქ", "Ꭰ", "🚀", "\u00a0", "\u3000", "\u2028", "\x00", "«", "ｆ", "，", "_",
    ]) | st.characters(),
    max_size=25,
).map("".join)  # fmt: skip


def split_in_stages(stages: list[str], text: str) -> list[str]:
    pieces = [text] if text else []
    for stage in stages:
        # Spans between matches are pieces too; a capturing split gives both.
        parts = [regex.split(f"({stage})", piece) for piece in pieces]
        pieces = [part for piece in parts for part in piece if part]
    return pieces


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_folded_patterns_cut_like_their_stages(kind: str, text: str) -> None:
    """One pass gives the pieces that the patterns give one after the other."""
    pieces = pre_tokenizer(kind).split(text)
    assert "".join(pieces) == text
    assert pieces == split_in_stages(STAGES[kind], text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(text=st.lists(TEXTS, max_size=12).map("".join), size=st.integers(1, 60))
def test_windows_do_not_show(kind: str, text: str, size: int) -> None:
    """A long text is cut in windows, and cut as if it were in one."""
    pre = pre_tokenizer(kind)
    assert [u for window in pre.windows(text, size) for u in window] == pre._units.findall(text)


def test_every_kind_is_covered() -> None:
    """Fixtures, stages and the table of pre-tokenizers name the same kinds."""
    assert set(STAGES) == set(KINDS) == set(pretokenize._KINDS)
    for alias in pretokenize._ALIASES:
        assert pre_tokenizer(alias).name in KINDS


def test_unknown_name() -> None:
    """The error names the file, the name, those that are known, and the flag."""
    with pytest.raises(TokenizerError) as caught:
        pre_tokenizer("brand-new", "model.gguf: tokenizer.ggml.pre")
    message = str(caught.value)
    assert message.startswith("model.gguf: tokenizer.ggml.pre: unknown pre-tokenizer: got 'brand-")
    assert "qwen2" in message and "--pre" in message
