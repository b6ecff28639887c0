"""GGUF model files: bytes on disk -> typed metadata and mapped tensors.

`open_gguf` reads, `GGUFWriter` writes, `BLOCKS` says what the weight formats mean.
"""

from ignis.gguf.blocks import BLOCKS, BlockFormat
from ignis.gguf.parse import TensorInfo
from ignis.gguf.reader import GGUFFile, open_gguf
from ignis.gguf.strings import StringArray
from ignis.gguf.values import MetaValue, ValueType
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
