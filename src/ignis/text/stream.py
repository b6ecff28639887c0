"""Token ids to text as they come, in whole characters."""

from __future__ import annotations

import codecs

from ignis.text.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one token at a time and never emits half a UTF-8 character.

    A token may end inside a character; its bytes wait for the next token. Bytes that can no longer
    become a character turn into U+FFFD at once, and those still waiting at the end in `flush`.
    Control tokens stand for no text.

    `start_of_text`: the first token starts a text, so the space that the model puts there is taken
    away, as `Tokenizer.decode` does; in the middle of a text it is a space like any other.
    """

    def __init__(self, tokenizer: Tokenizer, *, start_of_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._strips = start_of_text and tokenizer.model.add_space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; often the whole token, sometimes nothing."""
        strips, self._strips = self._strips, False
        if self._tokenizer.is_control(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        return self._decoder.decode(data.removeprefix(b" ") if strips else data)

    def flush(self) -> str:
        """What is left at the end of the stream; the decoder starts anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
