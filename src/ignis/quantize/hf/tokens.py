"""What a tokenizer file holds, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ignis.text.vocabulary import TokenKind


@dataclass(frozen=True, slots=True)
class Token:
    """A spelling, its kind, and its score where the vocabulary has scores."""

    text: str
    kind: int = TokenKind.NORMAL
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class BaseVocabulary:
    """What a tokenizer file holds: `tokens` by id, and the keys that only its kind has.

    `spells_spaces` says that pieces write `▁` for a space.
    """

    tokens: Mapping[int, Token]
    keys: Mapping[str, Any] = field(default_factory=dict)
    spells_spaces: bool = False
