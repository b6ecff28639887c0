"""The file that keeps the distributions of a run, for others to be compared with.

Little-endian, all of it. A header of 128 bytes, the tokens, then a record a scored position:

    0    magic       8 bytes, "IGNISKL\\0"
    8    version     u32, 1
    12   n_ctx       u32, tokens of a window
    16   n_vocab     u32, V: logits of a position
    20   n_tokens    u32, of the whole text
    24   first_id    i32, what replaces the first token of each window; -1: nothing does
    28   reserved    u32, 0
    32   vocabulary  32 bytes, SHA-256 of the spellings (see `vocabulary_digest`)
    64   text        32 bytes, SHA-256 of the tokens below
    96   reserved    28 bytes, 0
    124  checksum    u32, CRC-32 of the 124 bytes above
    128  tokens      u32 [n_tokens]

    record, 20 + 2 V bytes: checksum u32, CRC-32 of what follows; log_prob f64; top u32;
                            step f32; codes u16 [V]

What the numbers of a record mean, and how exact they are, is told in `rows`. The file's size
follows from its header, so one that was cut short is found before anything is computed.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ignis.errors import IgnisError, UsageError, WriteError
from ignis.gguf.atomic import check_replaceable, followed, written_whole
from ignis.perplexity.rows import RowRecord
from ignis.perplexity.windows import MIN_CTX, Windows
from ignis.quantize.target import check_room

if TYPE_CHECKING:
    from ignis.text import Tokenizer

_MAGIC, _VERSION = b"IGNISKL\0", 1
_HEADER = struct.Struct("<8s4IiI32s32s28x")
_CHECKSUM = struct.Struct("<I")
_FIELDS = struct.Struct("<dIf")
_HEADER_NBYTES = _HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class KLBase:
    """A base file's header and tokens, and where its records are."""

    path: Path
    windows: Windows
    n_vocab: int
    vocabulary: bytes

    @property
    def record_nbytes(self) -> int:
        return _record_nbytes(self.n_vocab)

    def check(self, windows: Windows, n_vocab: int, vocabulary: bytes) -> None:
        """Raise UsageError unless the records are of the same text, cut and tokenized alike."""
        own = self.windows
        differs = (
            ("context", f"windows of {windows.n_ctx} tokens", f"{own.n_ctx}",
             f"use --ctx {own.n_ctx}", own.n_ctx != windows.n_ctx),
            ("vocabulary", f"{n_vocab} logits", f"the vocabulary it was made with, {self.n_vocab}",
             "save a base with this model's own original",
             (self.n_vocab, self.vocabulary) != (n_vocab, vocabulary)),
            ("text", f"{len(windows.ids)} tokens", f"the {len(own.ids)} tokens it was made of",
             "leave the text out to use the base's own",
             own.first_id != windows.first_id or not np.array_equal(own.ids, windows.ids)),
        )  # fmt: skip
        for what, got, wanted, hint, wrong in differs:
            if wrong:
                raise UsageError(f"the base was made with another {what}", where=self.path,
                                 got=got, wanted=wanted, hint=hint)  # fmt: skip

    @contextmanager
    def records(self) -> Iterator[RecordReader]:
        """Read the records from the first on."""
        with _opened(self.path) as file:
            file.seek(_HEADER_NBYTES + 4 * len(self.windows.ids))
            yield RecordReader(self, file)


class RecordReader:
    """The records of a base file, in order."""

    def __init__(self, base: KLBase, file: BinaryIO) -> None:
        self._base, self._file = base, file

    def next(self, n_records: int) -> list[bytes]:
        """The next records, as they lie in the file; `parse` makes sense of them."""
        nbytes = self._base.record_nbytes
        found = [self._file.read(nbytes) for _ in range(n_records)]
        if any(len(record) != nbytes for record in found):
            raise UsageError("the base was cut short while it was read", where=self._base.path)
        return found

    def parse(self, record: bytes) -> RowRecord:
        """Raises UsageError for a record that is not as it was written."""
        (checksum,) = _CHECKSUM.unpack_from(record)
        log_prob, top, step = _FIELDS.unpack_from(record, _CHECKSUM.size)
        if zlib.crc32(memoryview(record)[_CHECKSUM.size :]) != checksum:
            raise _damaged(self._base.path, "a record whose checksum is wrong")
        codes = np.frombuffer(record, "<u2", offset=_CHECKSUM.size + _FIELDS.size)
        return RowRecord(log_prob, top, step, codes)


def pack_record(record: RowRecord) -> bytes:
    """A record as it lies in the file."""
    fields = _FIELDS.pack(record.log_prob, record.top, record.step)
    body = fields + record.codes.astype("<u2", copy=False).tobytes()
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def open_kl_base(path: Path) -> KLBase:
    """Read and check all but the records. Raises UsageError for a file that is no sound base."""
    with _opened(path) as file:
        head = file.read(_HEADER_NBYTES)
        if not head.startswith(_MAGIC):
            raise UsageError("not a file of base logits", where=path,
                             wanted="one that `ignis perplexity --save-kl` made")  # fmt: skip
        if len(head) < _HEADER_NBYTES:
            raise UsageError("the base was cut short", where=path, got=f"{len(head)} bytes",
                             wanted=f"a header of {_HEADER_NBYTES}")  # fmt: skip
        _, version, n_ctx, n_vocab, n_tokens, first_id, _, vocabulary, text = _HEADER.unpack_from(
            head)  # fmt: skip
        if _CHECKSUM.unpack_from(head, _HEADER.size)[0] != zlib.crc32(head[: _HEADER.size]):
            raise _damaged(path, "a header whose checksum is wrong")
        if version != _VERSION:
            raise UsageError("a base of another version", where=path, got=version,
                             wanted=_VERSION, hint="save it again")  # fmt: skip
        if n_ctx < MIN_CTX or n_tokens < n_ctx or not n_vocab:
            raise _damaged(path, f"{n_tokens} tokens in windows of {n_ctx}")
        _check_size(path, os.fstat(file.fileno()).st_size, n_ctx, n_vocab, n_tokens)
        tokens = file.read(4 * n_tokens)
        if hashlib.sha256(tokens).digest() != text:
            raise _damaged(path, "tokens whose digest is wrong")
        ids = np.frombuffer(tokens, "<i4").astype(np.int32)
    windows = Windows(ids, n_ctx, None if first_id < 0 else first_id)
    return KLBase(path, windows, n_vocab, vocabulary)


@contextmanager
def writing_kl_base(
    path: Path, windows: Windows, n_vocab: int, vocabulary: bytes
) -> Iterator[BinaryIO]:
    """A file for the records, header and tokens written; it appears under its name at the end.

    Raises UsageError for a path that is no file's, or that of another kind of file; WriteError
    where the disk refuses or is full.
    """
    with _told(WriteError, "write", path):
        # Links are followed: the file itself is replaced, not its name.
        whole = followed(path)
        check_room(whole, base_nbytes(windows, n_vocab))
        if whole.exists() and not whole.is_file():
            raise UsageError("cannot write the base there", where=path, got="no plain file",
                             wanted="a file name")  # fmt: skip
        check_replaceable(whole, _MAGIC, "a base")
        with written_whole(whole) as file:
            file.write(_header(windows, n_vocab, vocabulary))
            yield file


def base_nbytes(windows: Windows, n_vocab: int) -> int:
    """The size of a base file."""
    n_records = windows.n_windows * windows.n_scored
    return _HEADER_NBYTES + 4 * len(windows.ids) + n_records * _record_nbytes(n_vocab)


def vocabulary_digest(tokenizer: Tokenizer) -> bytes:
    """SHA-256 of the number of tokens, their lengths and their spellings, in order."""
    tokens = tokenizer.vocabulary.tokens
    digest = hashlib.sha256(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.lengths.astype("<i8").tobytes())
    digest.update(b"".join(tokens.iter_bytes()))
    return digest.digest()


def _damaged(path: Path, got: str) -> UsageError:
    return UsageError("the base is damaged", where=path, got=got, hint="save it again")


def _header(windows: Windows, n_vocab: int, vocabulary: bytes) -> bytes:
    tokens = windows.ids.astype("<i4").tobytes()
    first_id = -1 if windows.first_id is None else windows.first_id
    head = _HEADER.pack(_MAGIC, _VERSION, windows.n_ctx, n_vocab, len(windows.ids), first_id, 0,
                        vocabulary, hashlib.sha256(tokens).digest())  # fmt: skip
    return head + _CHECKSUM.pack(zlib.crc32(head)) + tokens


def _record_nbytes(n_vocab: int) -> int:
    return _CHECKSUM.size + _FIELDS.size + 2 * n_vocab


def _check_size(path: Path, nbytes: int, n_ctx: int, n_vocab: int, n_tokens: int) -> None:
    n_records = n_tokens // n_ctx * (n_ctx - 1 - n_ctx // 2)
    wanted = _HEADER_NBYTES + 4 * n_tokens + n_records * _record_nbytes(n_vocab)
    if nbytes != wanted:
        what = "cut short" if nbytes < wanted else "followed by something else"
        raise UsageError(f"the base is {what}", where=path, got=f"{nbytes} bytes",
                         wanted=wanted, hint="save it again")  # fmt: skip


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with _told(UsageError, "read", path), path.open("rb") as file:
        yield file


@contextmanager
def _told(kind: type[IgnisError], what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {what} the base: {error.strerror}", where=path) from None
