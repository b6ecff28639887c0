"""The byte map of byte-level BPE: every byte has one printable character.

Vocabularies of the GPT-2 family store text as characters that survive any tool: printable
Latin-1 bytes stand for themselves, the other 68 bytes for U+0100 and up, in order. So a space is
`Ġ` (U+0120) and a newline `Ċ` (U+010A).

Source: GPT-2's encoder (Radford et al. 2019), `bytes_to_unicode`.
"""

from __future__ import annotations

_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1),
              *range(ord("®"), ord("ÿ") + 1))  # fmt: skip


def _byte_characters() -> tuple[str, ...]:
    spare = iter(range(0x100, 0x200))
    printable = frozenset(_PRINTABLE)
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


BYTE_TO_CHARACTER: tuple[str, ...] = _byte_characters()
_CHARACTER_TO_BYTE = {character: byte for byte, character in enumerate(BYTE_TO_CHARACTER)}
_FROM_LATIN_1 = dict(enumerate(BYTE_TO_CHARACTER))


def to_characters(data: bytes) -> str:
    """The vocabulary's spelling of some bytes.

    >>> to_characters(b" caf\\xc3\\xa9")
    'ĠcafÃ©'
    """
    return data.decode("latin-1").translate(_FROM_LATIN_1)


def to_bytes(text: str) -> bytes:
    """The bytes that a token's spelling stands for; other characters give their own UTF-8.

    >>> to_bytes("ĠcafÃ©")
    b' caf\\xc3\\xa9'
    """
    try:
        return bytes(map(_CHARACTER_TO_BYTE.__getitem__, text))
    except KeyError:
        parts = (_CHARACTER_TO_BYTE.get(c) for c in text)
        return b"".join(
            c.encode() if byte is None else bytes((byte,))
            for c, byte in zip(text, parts, strict=True)
        )
