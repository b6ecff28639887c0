"""Token ids to text as they come, in whole characters."""

from __future__ import annotations

import codecs

from ignis.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one token at a time and never emits half a UTF-8 character.

    A token may end inside a character; its bytes wait for the next token. Bytes that can no longer
    become a character turn into U+FFFD at once, and those still waiting at the end in `flush`.
    Control tokens stand for no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; often the whole token, sometimes nothing."""
        if self._tokenizer.is_control(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end of the stream; the decoder starts anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
