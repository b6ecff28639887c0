"""Ops that know positions: rope, and attention with its KV cache.

Axes: T tokens, D width; H query heads, K key heads, C head width.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.checks import expect, matrix
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE, check_kv_type
from ignis.graph.ir.operation import (
    Operand,
    Operation,
    OptionalOperand,
    Value,
    choice,
    count,
    index,
    optional,
    positive,
)
from ignis.graph.ir.pointwise import capped
from ignis.graph.ir.rope import RopeScaling, rope_frequencies
from ignis.graph.ir.schedule import CHUNKS, ROWS, Stage
from ignis.graph.ir.types import KV_TYPES, Dim, TensorType

if TYPE_CHECKING:
    from ignis.graph.ir.evaluation import Array, Evaluation, Integers


class Rope(Operation):
    """Rotate the first `n_rot` elements of each head by angles that grow with the position.

    Pairs are (i, i + n_rot/2) in style "neox", (2i, 2i + 1) in style "interleaved"; pair i turns
    by position * base^(-2i/n_rot), divided by its factor where there are factors. All angles are
    divided by `divisor`; with YaRN's ramp those of pairs below `ramp_low` are not, and those up to
    `ramp_high` in part. The turned pair grows by `magnitude`. See `RopeScaling`.
    """

    name = "rope"
    in_place = ("x",)
    x = Operand("f32")
    factors = OptionalOperand("f32", weight=True)
    style = choice("neox", "interleaved")
    head_dim = count()
    n_rot = count()
    base = positive()
    divisor = optional(positive())
    ramp_low = optional(index())
    ramp_high = optional(index())
    magnitude = optional(positive())

    def infer(self) -> TensorType:
        _check_rope(self, self.x, self.factors)
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _rotated(self, step[self.x], step)


class Attention(Operation):
    """Store the step's keys and values, then attend causally within each token's own slot.

    Effect: the KV cache of `layer`. A token sees the positions up to its own, those of this step
    included; with a `window` only the last of them, its own among them. Query head h reads key head
    h // (H/K). With a `softcap` each score s becomes softcap * tanh(s / softcap). The cache keeps
    keys and values as `kv_type`, f16 where it is left out.
    """

    name = "attention"
    in_place = ("q",)
    q = Operand("f32")
    k = Operand("f32")
    v = Operand("f32")
    layer = index()
    n_heads = count()
    n_kv_heads = count()
    head_dim = count()
    scale = positive()
    window = optional(count())
    softcap = optional(positive())
    kv_type = optional(choice(*KV_TYPES))

    @property
    def effect(self) -> str:
        return _kv_cache(self.layer)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Keys and values are stored row by row, and then attended to."""
        cache = self.effect
        return (
            self.stage(ROWS, [self.k, self.v], [cache]),
            self.stage(CHUNKS, [self.q, cache], [self.result]),
        )

    def infer(self) -> TensorType:
        rows = _check_heads(self, self.q)
        kv = TensorType("f32", (rows, self.n_kv_heads * self.head_dim))
        expect(self, "k", self.k, kv)
        expect(self, "v", self.v, kv)
        return self.q.type

    def evaluate(self, step: Evaluation) -> Array:
        _store(self, step, step[self.k], step[self.v])
        return _attended(self, step, step[self.q])


class RopeStore(Operation):
    """Rotate q and k as rope does, store the rotated keys and the values; gives the rotated q.

    Effect: the KV cache of `layer`, which keeps them as `kv_type`, f16 where it is left out.
    """

    name = "rope_store"
    in_place = ("q",)
    q = Operand("f32")
    k = Operand("f32")
    v = Operand("f32")
    factors = OptionalOperand("f32", weight=True)
    layer = index()
    style = choice("neox", "interleaved")
    head_dim = count()
    n_rot = count()
    base = positive()
    divisor = optional(positive())
    ramp_low = optional(index())
    ramp_high = optional(index())
    magnitude = optional(positive())
    kv_type = optional(choice(*KV_TYPES))

    @property
    def effect(self) -> str:
        return _kv_cache(self.layer)

    def infer(self) -> TensorType:
        _check_rope(self, self.q, self.factors)
        _check_rope(self, self.k, self.factors)
        check_kv_type(self.kv_type or DEFAULT_KV_TYPE, self.head_dim, self.name)
        expect(self, "v", self.v, self.k.type)
        if self.q.type.shape[0] != self.k.type.shape[0]:
            raise GraphError(
                "operands 'q' and 'k' have different rows",
                where=self.name,
                got=f"{self.k}: {self.k.type}",
                wanted=f"{self.q.type.shape[0]} rows",
            )
        return self.q.type

    def evaluate(self, step: Evaluation) -> Array:
        _store(self, step, _rotated(self, step[self.k], step), step[self.v])
        return _rotated(self, step[self.q], step)


class Attend(Operation):
    """Attend to what the KV cache of `layer` holds: attention behind a rope_store.

    The step's own keys and values have been stored; a token sees the positions up to its own.
    """

    name = "attend"
    in_place = ("q",)
    q = Operand("f32")
    layer = index()
    n_heads = count()
    n_kv_heads = count()
    head_dim = count()
    scale = positive()
    window = optional(count())
    softcap = optional(positive())
    kv_type = optional(choice(*KV_TYPES))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return (self.stage(CHUNKS, [self.q, _kv_cache(self.layer)], [self.result]),)

    def infer(self) -> TensorType:
        _check_heads(self, self.q)
        return self.q.type

    def evaluate(self, step: Evaluation) -> Array:
        return _attended(self, step, step[self.q])


def _kv_cache(layer: int) -> str:
    return f"kv cache of layer {layer}"


def _check_rope(op: Rope | RopeStore, x: Value, factors: Value | None) -> None:
    """Raise GraphError unless x is a number of heads and `n_rot` fits one."""
    rows, width = matrix(op, x)
    _need_tokens(op, x, rows)
    if width % op.head_dim:
        raise GraphError(
            "the width is not a number of heads",
            where=op.name,
            got=width,
            wanted=f"a multiple of head_dim {op.head_dim}",
        )
    if op.n_rot % 2 or op.n_rot > op.head_dim:
        raise GraphError(
            "bad n_rot",
            where=op.name,
            got=op.n_rot,
            wanted=f"an even number up to head_dim {op.head_dim}",
        )
    if factors is not None:
        expect(op, "factors", factors, TensorType("f32", (op.n_rot // 2,)))


def _check_heads(op: Attention | Attend, q: Value) -> Dim:
    """The rows of q, whose heads must fit the attributes."""
    if op.n_heads % op.n_kv_heads:
        raise GraphError(
            "query heads can't be shared out to key heads",
            where=op.name,
            got=op.n_heads,
            wanted=f"a multiple of n_kv_heads {op.n_kv_heads}",
        )
    check_kv_type(op.kv_type or DEFAULT_KV_TYPE, op.head_dim, op.name)
    rows, _ = matrix(op, q)
    _need_tokens(op, q, rows)
    expect(op, "q", q, TensorType("f32", (rows, op.n_heads * op.head_dim)))
    return rows


def _need_tokens(op: Operation, x: Value, rows: Dim) -> None:
    """Positions and slots belong to tokens, not to rows that were selected from them."""
    if rows != "T":
        raise GraphError("the op needs a row a token", where=op.name, got=f"{x}: {x.type}",
                         wanted="T rows")  # fmt: skip


def _rotated(op: Rope | RopeStore, x: Array, step: Evaluation) -> Array:
    scaling = RopeScaling.of(op.attributes)
    frequencies = rope_frequencies(op.base, op.n_rot, step.get(op.factors), scaling)
    angle = step.positions[:, None, None] * frequencies
    heads = x.reshape(len(x), -1, op.head_dim)
    half = op.n_rot // 2
    neox = op.style == "neox"
    first = slice(0, half) if neox else slice(0, op.n_rot, 2)
    second = slice(half, op.n_rot) if neox else slice(1, op.n_rot, 2)
    a, b = heads[..., first], heads[..., second]
    turned = heads.copy()
    cos, sin = scaling.magnitude * np.cos(angle), scaling.magnitude * np.sin(angle)
    turned[..., first] = a * cos - b * sin
    turned[..., second] = a * sin + b * cos
    return turned.reshape(x.shape)


def _store(op: Attention | RopeStore, step: Evaluation, k: Array, v: Array) -> None:
    """Write the step's keys and values to the cache of the op's layer."""
    for slot in np.unique(step.slots):
        rows = np.flatnonzero(step.slots == slot)
        step.cache.store(op.layer, int(slot), step.positions[rows], k[rows], v[rows],
                         op.kv_type or DEFAULT_KV_TYPE)  # fmt: skip


def _attended(op: Attention | Attend, step: Evaluation, q: Array) -> Array:
    """Softmax-weighted values of each token's own slot."""
    out = np.empty_like(q)
    for slot in np.unique(step.slots):
        rows = np.flatnonzero(step.slots == slot)
        positions = step.positions[rows]
        seen = step.cache.read(op.layer, int(slot), int(positions.max()) + 1)
        out[rows] = _attended_slot(op, q[rows], *seen, positions)
    return out


def _attended_slot(
    op: Attention | Attend, q: Array, keys: Array, vals: Array, positions: Integers
) -> Array:
    n_tokens, n_seen = len(q), len(keys)
    group = op.n_heads // op.n_kv_heads
    by_head = q.reshape(n_tokens, op.n_kv_heads, group, op.head_dim).transpose(1, 2, 0, 3)
    keys = keys.reshape(n_seen, op.n_kv_heads, 1, op.head_dim).transpose(1, 2, 3, 0)
    vals = vals.reshape(n_seen, op.n_kv_heads, 1, op.head_dim).transpose(1, 2, 0, 3)
    visible = np.arange(n_seen) <= positions[:, None]
    if op.window is not None:
        visible &= np.arange(n_seen) > positions[:, None] - op.window
    scores = np.where(visible, capped((by_head @ keys) * op.scale, op.softcap), -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Array = _weighted(p, vals, visible) / p.sum(axis=-1, keepdims=True)
    return attended.transpose(2, 0, 1, 3).reshape(q.shape)


def _weighted(p: Array, vals: Array, visible: Any) -> Array:
    """p [K, G, T, n] times vals [K, 1, n, C]: what is not visible counts for nothing.

    A masked key's weight is zero, and zero times an infinity (a value beyond f16) would be NaN.
    """
    if np.isfinite(vals).all():
        return p @ vals
    by_token = [
        p[..., t : t + 1, seen] @ vals[..., seen, :] for t, seen in enumerate(visible)
    ]
    return np.concatenate(by_token, axis=-2)
