"""What an architecture file declares: how this kind of model differs from its relatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ignis.graph.ir import Value

if TYPE_CHECKING:
    from ignis.graph.models.config import ModelConfig
    from ignis.graph.models.lowering import Lowering

Layer: TypeAlias = "Callable[[Lowering, int, Value], Value]"


def as_read(config: ModelConfig) -> ModelConfig:
    """Nothing is left unsaid by the file."""
    return config


class Architecture(NamedTuple):
    """A kind of decoder.

    `name` is GGUF's `general.architecture`; `rope_style` how its heads pair elements ("neox" or
    "interleaved"); `layer` emits layer i on the residual stream and returns the new stream.
    `honours` names the keys of its files, of those that not every architecture knows, that it
    follows; all others are refused where they would change something. With a sliding window every
    `window_pattern`-th layer sees all positions; with 1 none does. `neutral` names keys that mean
    something in its files only, and the values that change nothing. `complete` fills in what
    files of this kind leave unsaid.
    """

    name: str
    rope_style: str
    layer: Layer
    honours: frozenset[str] = frozenset()
    window_pattern: int = 1
    neutral: tuple[tuple[str, object], ...] = ()
    complete: Callable[[ModelConfig], ModelConfig] = as_read
