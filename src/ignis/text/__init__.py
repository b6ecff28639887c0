"""Text to token ids and back: tokenizers, the streaming decoder, chat templates."""

from ignis.text.chat import ChatTemplate, Segment
from ignis.text.stream import StreamDecoder
from ignis.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Segment", "StreamDecoder", "Tokenizer"]
