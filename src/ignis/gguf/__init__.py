"""GGUF model files: bytes on disk -> typed metadata and mapped tensors.

`open_gguf` reads, `GGUFWriter` writes, `BLOCKS` says what the weight formats mean. The writer is
imported on first use (PEP 562): to run a model nothing is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ignis.gguf.blocks import BLOCKS, BlockFormat
from ignis.gguf.parse import TensorInfo
from ignis.gguf.reader import GGUFFile, open_gguf
from ignis.gguf.strings import StringArray
from ignis.gguf.values import MetaValue, ValueType

if TYPE_CHECKING:
    from ignis.gguf.writer import GGUFWriter

__all__ = [
    "BLOCKS",
    "BlockFormat",
    "GGUFFile",
    "GGUFWriter",
    "MetaValue",
    "StringArray",
    "TensorInfo",
    "ValueType",
    "open_gguf",
]


def __getattr__(name: str) -> Any:
    if name == "GGUFWriter":
        from ignis.gguf.writer import GGUFWriter

        return GGUFWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
