"""If these break, tokens of a vocabulary are cut in the wrong places."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ignis.gguf.strings import StringWalkError, walk_strings

_STRINGS = st.lists(
    st.binary(max_size=12)
    | st.sampled_from([b"", b"\0" * 7, b"\1" + b"\0" * 7, b"x" * 255, b"x" * 256, b"y" * 70000]),
    max_size=40,
)


@given(strings=_STRINGS, before=st.binary(max_size=9), behind=st.binary(max_size=9))
@example(strings=[b"a"] * 30000 + [b"b" * 200], before=b"", behind=b"\1" + b"\0" * 7 + b"c")
@example(strings=[b"a", b"", b"", b"b"], before=b"", behind=b"")
def test_strings_are_found_whatever_they_hold(
    strings: list[bytes], before: bytes, behind: bytes
) -> None:
    """Short text is found all at once, by its zero bytes; no other text may be mistaken for it."""
    packed = b"".join(struct.pack("<Q", len(s)) + s for s in strings)
    buffer = before + packed + behind
    data = np.frombuffer(buffer, np.uint8)
    found, end = walk_strings(buffer, data, len(before), len(strings))
    assert list(found.iter_bytes()) == strings
    assert end == len(before) + len(packed)


@pytest.mark.parametrize("length", [3, 255, 256, 1 << 63])
def test_a_string_that_is_cut_short_is_named(length: int) -> None:
    whole = struct.pack("<Q", 1) + b"a"
    buffer = whole * 2 + struct.pack("<Q", length) + b"bc"
    with pytest.raises(StringWalkError) as caught:
        walk_strings(buffer, np.frombuffer(buffer, np.uint8), 0, 3)
    assert caught.value.index == 2
