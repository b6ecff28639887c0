"""The merge rules of a GGUF file as flat arrays that native code can probe.

A rule `left right` has a rank, its line number: the lower, the earlier it is applied. The table
maps a pair of symbols to the rank and to the symbol of the merged pair. Symbols are token ids;
the few spellings that occur in rules but are no tokens get ids from `n_tokens` upward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignis.errors import TokenizerError
from ignis.gguf import StringArray
from ignis.text.bytelevel import BYTE_TO_CHARACTER, to_bytes
from ignis.text.hashing import I32, MULTIPLIER, Spans, blocks, place, table_bits
from ignis.text.vocabulary import Vocabulary, checked_spans

# One slot: the key `left << 32 | right` (-1: empty), rank, merged symbol. 16 bytes, so a probe
# touches one cache line.
SLOT = np.dtype([("key", "<i8"), ("rank", "<i4"), ("merged", "<i4")])


class MergeTable(NamedTuple):
    """Pairs of symbols to rank and merged symbol, and the symbol of each byte.

    `slots` has 2^n_bits entries of `SLOT`; a key's first slot is the top `n_bits` bits of
    `key * MULTIPLIER`, the next ones follow, wrapping around. `extra` holds the bytes of symbols
    that are no tokens.
    """

    slots: NDArray[Any]
    n_bits: int
    byte_symbols: I32
    extra: dict[int, bytes]

    def find(self, left: int, right: int) -> tuple[int, int] | None:
        """Rank and merged symbol of a pair, or None: the plain form of the native probe."""
        key, mask = left << 32 | right, len(self.slots) - 1
        slot = (key * MULTIPLIER & (1 << 64) - 1) >> (64 - self.n_bits)
        while True:
            entry = self.slots[slot]
            if entry["key"] == key:
                return int(entry["rank"]), int(entry["merged"])
            if entry["key"] < 0:
                return None
            slot = (slot + 1) & mask


def read_merges(vocabulary: Vocabulary, merges: StringArray, where: str) -> MergeTable:
    """Build the table from `tokenizer.ggml.merges`; raises `TokenizerError` for a bad rule."""
    spans = checked_spans(merges, where)
    gaps = _space_positions(spans, where)
    hashes = np.empty((3, gaps.size), np.uint64)  # left, right, merged
    symbols = np.empty((3, gaps.size), np.int32)
    for part in blocks(gaps.size):
        offsets, lengths, gap = spans.offsets[part], spans.lengths[part], gaps[part]
        hashes[0, part] = spans.hashes_of(offsets, gap)
        hashes[1, part] = spans.hashes_of(offsets + gap + 1, lengths - gap - 1)
        hashes[2, part] = spans.hashes_without(offsets, lengths, gap)
        for found, wanted in zip(symbols, hashes, strict=True):
            found[part] = vocabulary.find_hashes(wanted[part])
    byte_hashes = Spans.of([c.encode() for c in BYTE_TO_CHARACTER]).hashes()
    byte_symbols = vocabulary.find_hashes(byte_hashes)
    extra: dict[int, bytes] = {}
    if (symbols < 0).any() or (byte_symbols < 0).any():
        new = _distinct(np.concatenate([hashes[symbols < 0], byte_hashes[byte_symbols < 0]]))
        for ids, wanted in ((symbols, hashes), (byte_symbols, byte_hashes)):
            missing = ids < 0
            ids[missing] = vocabulary.n_tokens + np.searchsorted(new, wanted[missing])
        extra = _spell(merges, symbols, vocabulary.n_tokens)
        extra |= {int(s): bytes((b,)) for b, s in enumerate(byte_symbols)
                  if s >= vocabulary.n_tokens}  # fmt: skip
    return MergeTable(*_fill(symbols), byte_symbols, extra)


def _space_positions(spans: Spans, where: str) -> NDArray[np.int64]:
    """The index of the space in each rule; the first character may itself be one."""
    spaces = np.flatnonzero(spans.bytes == ord(" "))
    after = np.searchsorted(spaces, spans.offsets + 1)
    positions = np.append(spaces, np.iinfo(np.int64).max)[after] - spans.offsets
    bad = np.flatnonzero(positions >= spans.lengths - 1)
    if bad.size:
        raise TokenizerError("a merge rule is not two symbols with a space between", where=where,
                             got=f"rule {int(bad[0])}")  # fmt: skip
    return positions


def _fill(symbols: I32) -> tuple[NDArray[Any], int]:
    keys = symbols[0].astype(np.int64) << 32 | symbols[1]
    unsigned = keys.view(np.uint64)
    n_bits = table_bits(keys.size)
    first = ((unsigned * np.uint64(MULTIPLIER)) >> np.uint64(64 - n_bits)).astype(np.int64)
    table = place(unsigned, first, n_bits)
    slots = np.empty(table.size, SLOT)
    slots["key"], slots["rank"] = -1, table
    used = np.flatnonzero(table >= 0)
    slots["key"][used] = keys[table[used]]
    slots["merged"][used] = symbols[2, table[used]]
    return slots, n_bits


def _distinct(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The different ones in ascending order: `np.unique` would import `numpy.ma`, 8 ms of it."""
    ordered = np.sort(hashes)
    is_new = np.ones(ordered.size, np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def _spell(merges: StringArray, symbols: I32, n_tokens: int) -> dict[int, bytes]:
    """The bytes of every symbol of a rule that is no token."""
    extra: dict[int, bytes] = {}
    for part, rule in np.argwhere(symbols >= n_tokens).tolist():
        text = merges.bytes_at(rule).decode("utf-8", "replace")
        gap = text.index(" ", 1)
        spelling = (text[:gap], text[gap + 1 :], text[:gap] + text[gap + 1 :])[part]
        extra[int(symbols[part, rule])] = to_bytes(spelling)
    return extra
