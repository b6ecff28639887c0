"""What an architecture file declares: how this kind of model differs from its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ignis.graph.ir import Value

if TYPE_CHECKING:
    from ignis.graph.models.lowering import Lowering

Layer: TypeAlias = "Callable[[Lowering, int, Value], Value]"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of decoder.

    `name` is GGUF's `general.architecture`; `rope_style` how its heads pair elements ("neox" or
    "interleaved"); `layer` emits layer i on the residual stream and returns the new stream.
    """

    name: str
    rope_style: str
    layer: Layer
