"""Mixtures of experts: the numbers that shape them, and the block in the feed-forward's place.

A router scores all experts for each token; the best few compute, and their outputs are added by
weight. Some models have a shared expert besides, which every token goes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.graph.ir import Value
from ignis.graph.ir.ops import Route
from ignis.graph.models.blocks import feed_forward
from ignis.graph.models.lowering import Lowering

if TYPE_CHECKING:
    from ignis.graph.models.config import ModelConfig

EXPERT_KEYS = frozenset({"expert_count", "expert_weights_norm", "expert_weights_scale"})
"""Keys that every architecture with experts follows."""


class Experts(NamedTuple):
    """What shapes the experts of a model. Where a file says nothing, its architecture does."""

    n_experts: int
    n_used: int
    """Experts that a token goes through."""
    n_ff: int | None = None
    """Hidden width of an expert."""
    n_ff_shared: int | None = None
    """Hidden width of the shared expert, where there is one."""
    normalized: bool | None = None
    """Whether the gates of a token's experts add up to one."""
    scale: float = 1.0
    """What gates are multiplied by."""


def complete(
    config: ModelConfig, *, normalized: bool, n_ff: int, n_ff_shared: int | None = None
) -> ModelConfig:
    """The config with what its file leaves unsaid about experts."""
    e = config.experts
    assert e is not None
    if e.normalized is not None:
        normalized = e.normalized
    filled = e._replace(
        normalized=normalized, n_ff=e.n_ff or n_ff, n_ff_shared=e.n_ff_shared or n_ff_shared
    )
    return config._replace(experts=filled)


def needed(config: ModelConfig) -> Experts:
    """The experts of a model that must have some, or ModelFileError."""
    if config.experts is None:
        raise ModelFileError(
            f"bad {config.architecture}.expert_count",
            where=config.source,
            got="no experts",
            wanted="an integer from 1",
        )
    return config.experts


def expert_feed_forward(m: Lowering, i: int, x: Value, residual: Value) -> Value:
    """The experts of layer i on the normalized stream x, added to the residual stream.

    The shared expert is added first. Ops stand in the order in which they need not wait: those of
    the shared expert beside the router, its gate and sum beside the other experts' hidden layer.
    """
    e, blk, n_embd = m.config.experts, f"blk.{i}", m.config.n_embd
    assert e is not None and e.n_ff is not None
    _refuse_split_experts(m, blk)
    logits = m.linear(x, f"{blk}.ffn_gate_inp", e.n_experts)
    shared = None
    if e.n_ff_shared is not None:
        shared = feed_forward(m, i, x, n_ff=e.n_ff_shared, suffix="_shexp")
    limits = {} if e.scale == 1 else {"scale": e.scale}
    among = "chosen" if e.normalized else "all"
    experts, gates = m.b.emit(Route, logits, n_used=e.n_used, among=among, **limits).results
    gate, up = (
        m.b.expert_matmul(
            x, experts, m.matrix(f"{blk}.ffn_{name}_exps.weight", e.n_experts, e.n_ff, n_embd)
        )
        for name in ("gate", "up")
    )
    if shared is not None:
        scores = m.row_weight(f"{blk}.ffn_gate_inp_shexp.weight", n_embd)
        residual = m.b.add(residual, m.b.row_gate(shared, x, scores))
    down = m.matrix(f"{blk}.ffn_down_exps.weight", e.n_experts, n_embd, e.n_ff)
    gated = m.b.mul(m.b.silu(gate), up)
    return m.b.expert_sum(gated, experts, gates, down, residual)


def _refuse_split_experts(m: Lowering, blk: str) -> None:
    """Files of the first months of Mixtral hold each expert as tensors of its own."""
    name = f"{blk}.ffn_gate.0.weight"
    if m.has(name):
        raise UnsupportedModelError(
            f"tensor {name} holds a single expert",
            where=m.source,
            wanted=f"{blk}.ffn_gate_exps.weight with all of them",
            hint="take a file converted after April 2024, or convert the model again",
        )
