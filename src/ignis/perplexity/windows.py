"""A text as windows of tokens, each read by the model on its own.

The convention is that of llama.cpp's `llama-perplexity`, so that figures can be compared: windows
lie one behind the other, the first token of each is replaced by BOS where the tokenizer adds one,
and only tokens of the second half are scored, which all have half a window before them. What does
not fill a window at the end of the text is left out.

    window     | BOS 1 2 3 | 4 5 6 7 |          n_ctx = 8
    scored                     5 6 7            by the logits of 4 5 6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UsageError

if TYPE_CHECKING:
    from ignis.text import Tokenizer

DEFAULT_CTX = 512
MIN_CTX = 8  # three tokens scored a window


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The tokens of a text, int32 [n], cut into windows of `n_ctx`."""

    ids: NDArray[np.int32]
    n_ctx: int
    first_id: int | None = None  # takes the place of every window's first token

    def __post_init__(self) -> None:
        if self.n_ctx < MIN_CTX:
            raise UsageError("windows can't be so short", got=f"{self.n_ctx} tokens",
                             wanted=f"{MIN_CTX} or more", hint="choose a larger --ctx")  # fmt: skip
        if not self.n_windows:
            raise UsageError(
                "the text is too short to be scored", got=f"{len(self.ids)} tokens",
                wanted=f"{self.n_ctx}, which make one window", hint="choose a smaller --ctx",
            )  # fmt: skip

    @classmethod
    def of_text(cls, tokenizer: Tokenizer, text: str, n_ctx: int) -> Windows:
        """Cut a text. Raises UsageError where it does not fill a window.

        Control tokens written in the text are plain text.
        """
        first = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        ids = np.array(first + tokenizer.encode(text), np.int32)
        return cls(ids, n_ctx, first[0] if first else None)

    @property
    def n_windows(self) -> int:
        return len(self.ids) // self.n_ctx

    @property
    def n_unscored(self) -> int:
        """Tokens of a window that are read before the first whose logits count."""
        return self.n_ctx // 2

    @property
    def n_scored(self) -> int:
        """Tokens of a window that are scored."""
        return self.n_ctx - 1 - self.n_unscored

    def fed(self, index: int) -> list[int]:
        """What the model reads of a window: all but the last token."""
        start = index * self.n_ctx
        ids: list[int] = self.ids[start : start + self.n_ctx - 1].tolist()
        if self.first_id is not None:
            ids[0] = self.first_id
        return ids

    def targets(self, index: int) -> NDArray[np.int32]:
        """The tokens of a window that are scored, int32 [n_scored]."""
        end = (index + 1) * self.n_ctx
        return self.ids[end - self.n_scored : end]
