"""The architectures that can be lowered."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ignis.errors import UnsupportedModelError
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.llama import LLAMA
from ignis.graph.models.qwen2 import QWEN2

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {architecture.name: architecture for architecture in (LLAMA, QWEN2)}
)


def find_architecture(name: str, source: str) -> Architecture:
    """The architecture of that name, or UnsupportedModelError listing those there are."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            "unsupported architecture",
            where=source,
            got=repr(name),
            wanted=" or ".join(ARCHITECTURES),
        )
    return ARCHITECTURES[name]
