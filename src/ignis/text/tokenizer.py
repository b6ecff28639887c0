"""Text to token ids and back, as a GGUF file says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import regex

from ignis.errors import TokenizerError
from ignis.gguf import GGUFFile
from ignis.text.models import MODELS, tokenizer_model_name
from ignis.text.partition import Partition
from ignis.text.vocabulary import Vocabulary
from ignis.text.words import WordModel

_WHITE_SPACE = " \t\n\v\f\r"


class Tokenizer:
    """Encodes text to token ids and decodes ids to text.

        tok = Tokenizer.from_gguf(open_gguf("model.gguf"))
        tok.encode("Hello world")                    # special tokens in the text stay plain text
        tok.encode("<|im_start|>user", special=True) # the caller trusts this text

    User-defined tokens of a file are parsed in any text; control tokens only with `special`.
    """

    def __init__(self, vocabulary: Vocabulary, model: WordModel) -> None:
        self.vocabulary, self.model = vocabulary, model
        self.n_vocab = vocabulary.n_tokens
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.add_bos = (vocabulary.option("add_bos_token", model.add_bos)
                        and self.bos_id is not None)  # fmt: skip
        self.add_eos = vocabulary.option("add_eos_token", False) and self.eos_id is not None
        self._stripping = vocabulary.stripping_ids
        user_defined = vocabulary.user_defined_ids
        self._plain = Partition(vocabulary, user_defined)
        self._special = Partition(vocabulary, user_defined | vocabulary.control_ids)

    @classmethod
    def from_gguf(cls, file: GGUFFile, pre: str | None = None) -> Tokenizer:
        """The tokenizer of a GGUF file; `pre` overrides the pre-tokenizer that it names.

        Raises `TokenizerError` for an unknown pre-tokenizer or a broken vocabulary, and
        `UnsupportedModelError` for a kind of tokenizer that is not built yet.
        """
        name = tokenizer_model_name(file)  # the clearest first complaint
        vocabulary = Vocabulary(file)
        return cls(vocabulary, MODELS[name](file, vocabulary, pre))

    def encode(
        self,
        text: str | bytes,
        special: bool = False,
        add_special: bool = False,
        after: int | None = None,
    ) -> list[int]:
        """Token ids of text; bytes that are not UTF-8 are kept as they are.

        `special`: parse control tokens in the text. `add_special`: add BOS and EOS where the file
        says so. `after`: the special token that stands before this text; some swallow white space.
        """
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        partition = self._special if special else self._plain
        pieces = partition.split(_valid(text))
        if self._stripping:
            pieces = self._stripped(pieces, after)
        ids += self.model.encode(pieces)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _stripped(self, pieces: Iterator[str | int], after: int | None) -> Iterator[str | int]:
        """The pieces without the white space that special tokens before them swallow."""
        for piece in pieces:
            if isinstance(piece, int):
                after = piece
                yield piece
            elif kept := piece.lstrip(_WHITE_SPACE) if after in self._stripping else piece:
                yield kept

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD, control tokens are left out.

        Where the model puts a space before its text, the one of the first token is taken away,
        unless that is a control token: what llama.cpp does.
        """
        ids = list(ids)
        kept = (i for i in ids if not (skip_special and self.is_control(i)))
        data = b"".join(map(self.token_bytes, kept))
        if self.model.add_space_prefix and ids and not self.is_control(ids[0]):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a control token gives its spelling."""
        if not 0 <= token_id < self.n_vocab:
            raise TokenizerError("no such token", got=token_id, wanted=f"0 to {self.n_vocab - 1}")
        return self.model.token_bytes(token_id)

    def is_control(self, token_id: int) -> bool:
        """Whether a token steers the model and stands for no text."""
        return token_id in self.vocabulary.control_ids


def _valid(text: str | bytes) -> str:
    """Text whose only lone surrogates are U+DC80 to U+DCFF, each a byte that is not UTF-8."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "surrogateescape")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        other: str = regex.sub("[\ud800-\udc7f\udd00-\udfff]", "\N{REPLACEMENT CHARACTER}", text)
        return other.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return text

