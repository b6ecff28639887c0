"""Cutting text at the spellings of special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import takewhile

from ignis.text.vocabulary import Vocabulary

_MAX_DEPTH = 48  # of nested groups; the parser of expressions is recursive


class Partition:
    """Cuts text at the spellings of some tokens, preferring the leftmost, then the longest."""

    def __init__(self, vocabulary: Vocabulary, ids: Iterable[int]) -> None:
        self._vocabulary, self._ids = vocabulary, frozenset(ids)

    @cached_property  # thousands of spellings take a tenth of a second
    def _spellings(self) -> dict[str, int]:
        ids = sorted(self._ids, reverse=True)
        return {text: i for i in ids if (text := self._vocabulary.text_at(i))}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(any_of(self._spellings))

    def split(self, text: str) -> Iterator[str | int]:
        """Plain text and token ids as they come; no text is empty."""
        end = 0
        for match in self._pattern.finditer(text) if self._ids and self._spellings else ():
            if match.start() > end:
                yield text[end : match.start()]
            yield self._spellings[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:]


def any_of(words: Iterable[str], depth: int = 0) -> str:
    """An expression that matches the longest of some words, as a tree of their prefixes.

    Vocabularies have thousands of special tokens, which a plain list of alternatives would try one
    after the other at every `<`.

    >>> any_of(["<a>", "<b>", "<bc>", "x"])
    '(?:<(?:a>|b(?:>|c>))|x)'
    >>> any_of(["a", "ab"])
    'a(?:b)?'
    """
    tails = sorted(set(words))
    if depth == _MAX_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(tails, key=len, reverse=True)))})"
    optional = tails[:1] == [""]
    branches: dict[str, list[str]] = {}
    for word in tails[optional:]:
        branches.setdefault(word[0], []).append(word)
    parts = []
    for group in branches.values():
        # Sorted words share what the first and the last of them share.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(group[0], group[-1], strict=False))
        prefix = "".join(a for a, _ in same)
        rest = [word[len(prefix) :] for word in group]
        parts.append(re.escape(prefix) + (any_of(rest, depth + 1) if len(rest) > 1 else ""))
    if optional:
        return f"(?:{'|'.join(parts)})?"
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
