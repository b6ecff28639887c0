"""The value types of GGUF metadata and what each is in Python.

Source: the GGUF specification, `gguf_metadata_value_type` (ggml, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ignis.gguf.strings import StringArray

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

MetaValue: TypeAlias = "int | float | bool | str | NDArray[Any] | StringArray | MetaTuple"
MetaTuple: TypeAlias = "tuple[MetaValue, ...]"      # an array of arrays


class ValueType(IntEnum):
    """The type id that stands before every metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


DTYPES: Mapping[ValueType, np.dtype[Any]] = MappingProxyType({
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
})

# A bool is packed as the byte it is, so that the reader can refuse 2..255.
STRUCTS: Mapping[ValueType, Struct] = MappingProxyType({
    kind: Struct("<" + code) for kind, code in zip(DTYPES, "BbHhIifBQqd", strict=True)
})
