"""The architectures that can be lowered."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ignis.errors import UnsupportedModelError
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.gemma2 import GEMMA2
from ignis.graph.models.gemma3 import GEMMA3
from ignis.graph.models.granite import GRANITE
from ignis.graph.models.llama import LLAMA
from ignis.graph.models.phi3 import PHI3
from ignis.graph.models.qwen2 import QWEN2
from ignis.graph.models.qwen2moe import QWEN2MOE
from ignis.graph.models.qwen3 import QWEN3
from ignis.graph.models.qwen3moe import QWEN3MOE
from ignis.graph.models.smollm3 import SMOLLM3

_ALL = (LLAMA, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, GRANITE, SMOLLM3, QWEN2MOE, QWEN3MOE)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {architecture.name: architecture for architecture in _ALL}
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
