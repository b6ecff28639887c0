"""Every op of the IR, each declared once.

Axes: T tokens, R rows with logits, D width, N output width, V vocabulary; H query heads, K key
heads, C head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.a8 import dequantize_a8, quantize_a8
from ignis.graph.ir.evaluation import Array, Evaluation, Integers
from ignis.graph.ir.operation import (
    Operand,
    Operation,
    OptionalOperand,
    Value,
    choice,
    count,
    index,
    positive,
)
from ignis.graph.ir.rope import rope_frequencies
from ignis.graph.ir.types import A8_BLOCK, WEIGHT_FORMATS, Dim, TensorType


class Normalize(Operation):
    """Divide each row by its root mean square: x * r with r = 1 / sqrt(mean(x^2) + eps)."""

    name = "normalize"
    in_place = ("x",)
    x = Operand("f32")
    eps = positive()

    def infer(self) -> TensorType:
        _matrix(self, self.x)
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _normalized(step[self.x], self.eps)


class Scale(Operation):
    """Multiply each row by a gain: x * gain."""

    name = "scale"
    in_place = ("x",)
    x = Operand("f32")
    gain = Operand("f32", weight=True)

    def infer(self) -> TensorType:
        _, width = _matrix(self, self.x)
        _expect(self, "gain", self.gain, TensorType("f32", (width,)))
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return step[self.x] * step[self.gain]


class Rmsnorm(Operation):
    """Normalize and scale in one: (x * r) * gain."""

    name = "rmsnorm"
    in_place = ("x",)
    x = Operand("f32")
    gain = Operand("f32", weight=True)
    eps = positive()

    def infer(self) -> TensorType:
        _, width = _matrix(self, self.x)
        _expect(self, "gain", self.gain, TensorType("f32", (width,)))
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _normalized(step[self.x], self.eps) * step[self.gain]


class Matmul(Operation):
    """Multiply by a weight's transpose; then bias, then residual are added, in that order."""

    name = "matmul"
    in_place = ("residual",)
    x = Operand("f32", "a8")
    weight = Operand(*WEIGHT_FORMATS, weight=True)
    bias = OptionalOperand("f32", weight=True)
    residual = OptionalOperand("f32")

    def infer(self) -> TensorType:
        rows, n_outputs = _product(self, self.x, self.weight)
        result = TensorType("f32", (rows, n_outputs))
        if self.bias is not None:
            _expect(self, "bias", self.bias, TensorType("f32", (n_outputs,)))
        if self.residual is not None:
            _expect(self, "residual", self.residual, result)
        return result

    def evaluate(self, step: Evaluation) -> Array:
        y = step[self.x] @ step[self.weight].T
        for addend in (step.get(self.bias), step.get(self.residual)):
            if addend is not None:
                y = y + addend
        return y


class Rope(Operation):
    """Rotate the first `n_rot` elements of each head by angles that grow with the position.

    Pairs are (i, i + n_rot/2) in style "neox", (2i, 2i + 1) in style "interleaved"; pair i turns
    by position * base^(-2i/n_rot), divided by its factor where there are factors.
    """

    name = "rope"
    in_place = ("x",)
    x = Operand("f32")
    factors = OptionalOperand("f32", weight=True)
    style = choice("neox", "interleaved")
    head_dim = count()
    n_rot = count()
    base = positive()

    def infer(self) -> TensorType:
        _, width = _matrix(self, self.x)
        if width % self.head_dim:
            raise GraphError(
                "the width is not a number of heads",
                where=self.name,
                got=width,
                wanted=f"a multiple of head_dim {self.head_dim}",
            )
        if self.n_rot % 2 or self.n_rot > self.head_dim:
            raise GraphError(
                "bad n_rot",
                where=self.name,
                got=self.n_rot,
                wanted=f"an even number up to head_dim {self.head_dim}",
            )
        if self.factors is not None:
            _expect(self, "factors", self.factors, TensorType("f32", (self.n_rot // 2,)))
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        x = step[self.x]
        frequencies = rope_frequencies(self.base, self.n_rot, step.get(self.factors))
        angle = step.positions[:, None, None] * frequencies
        heads = x.reshape(len(x), -1, self.head_dim)
        half = self.n_rot // 2
        neox = self.style == "neox"
        first = slice(0, half) if neox else slice(0, self.n_rot, 2)
        second = slice(half, self.n_rot) if neox else slice(1, self.n_rot, 2)
        a, b = heads[..., first], heads[..., second]
        turned = heads.copy()
        turned[..., first] = a * np.cos(angle) - b * np.sin(angle)
        turned[..., second] = a * np.sin(angle) + b * np.cos(angle)
        return turned.reshape(x.shape)


class Attention(Operation):
    """Store the step's keys and values, then attend causally within each token's own slot.

    Effect: the KV cache of `layer`. A token sees the positions up to its own, those of this step
    included. Query head h reads key head h // (H/K).
    """

    name = "attention"
    q = Operand("f32")
    k = Operand("f32")
    v = Operand("f32")
    layer = index()
    n_heads = count()
    n_kv_heads = count()
    head_dim = count()
    scale = positive()

    @property
    def effect(self) -> str:
        return f"kv cache of layer {self.layer}"

    def infer(self) -> TensorType:
        if self.n_heads % self.n_kv_heads:
            raise GraphError(
                "query heads can't be shared out to key heads",
                where=self.name,
                got=self.n_heads,
                wanted=f"a multiple of n_kv_heads {self.n_kv_heads}",
            )
        rows, _ = _matrix(self, self.q)
        kv = TensorType("f32", (rows, self.n_kv_heads * self.head_dim))
        _expect(self, "q", self.q, TensorType("f32", (rows, self.n_heads * self.head_dim)))
        _expect(self, "k", self.k, kv)
        _expect(self, "v", self.v, kv)
        return self.q.type

    def evaluate(self, step: Evaluation) -> Array:
        q, k, v = step[self.q], step[self.k], step[self.v]
        out = np.empty_like(q)
        for slot in np.unique(step.slots):
            rows = np.flatnonzero(step.slots == slot)
            positions = step.positions[rows]
            step.cache.store(self.layer, int(slot), positions, k[rows], v[rows])
            seen = step.cache.read(self.layer, int(slot), int(positions.max()) + 1)
            out[rows] = self._attend(q[rows], *seen, positions)
        return out

    def _attend(self, q: Array, keys: Array, vals: Array, positions: Integers) -> Array:
        n_tokens, n_seen = len(q), len(keys)
        group = self.n_heads // self.n_kv_heads
        by_head = q.reshape(n_tokens, self.n_kv_heads, group, self.head_dim).transpose(1, 2, 0, 3)
        keys = keys.reshape(n_seen, self.n_kv_heads, 1, self.head_dim).transpose(1, 2, 3, 0)
        vals = vals.reshape(n_seen, self.n_kv_heads, 1, self.head_dim).transpose(1, 2, 0, 3)
        visible = np.arange(n_seen) <= positions[:, None]
        scores = np.where(visible, (by_head @ keys) * self.scale, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended: Array = (p @ vals) / p.sum(axis=-1, keepdims=True)
        return attended.transpose(2, 0, 1, 3).reshape(q.shape)


class Add(Operation):
    """Add two values: the residual stream and a branch."""

    name = "add"
    in_place = ("a", "b")
    a = Operand("f32")
    b = Operand("f32")

    def infer(self) -> TensorType:
        _expect(self, "b", self.b, self.a.type)
        return self.a.type

    def evaluate(self, step: Evaluation) -> Array:
        return step[self.a] + step[self.b]


class Silu(Operation):
    """The sigmoid-weighted unit: x / (1 + exp(-x))."""

    name = "silu"
    in_place = ("x",)
    x = Operand("f32")

    def infer(self) -> TensorType:
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _silu(step[self.x])


class Mul(Operation):
    """Multiply two values elementwise."""

    name = "mul"
    in_place = ("a", "b")
    a = Operand("f32")
    b = Operand("f32")

    def infer(self) -> TensorType:
        _expect(self, "b", self.b, self.a.type)
        return self.a.type

    def evaluate(self, step: Evaluation) -> Array:
        return step[self.a] * step[self.b]


class Swiglu(Operation):
    """The gated unit of a feed-forward block: silu(gate) * up."""

    name = "swiglu"
    in_place = ("gate", "up")
    gate = Operand("f32")
    up = Operand("f32")

    def infer(self) -> TensorType:
        _expect(self, "up", self.up, self.gate.type)
        return self.gate.type

    def evaluate(self, step: Evaluation) -> Array:
        return _silu(step[self.gate]) * step[self.up]


class Quantize(Operation):
    """Quantize rows to A8 blocks of 32 (NUMERICS 1); exact evaluation is the identity.

    With rows = "R" only those that need logits are quantized, with "T" all there are.
    """

    name = "quantize"
    x = Operand("f32")
    rows = choice("T", "R", default="T")

    def infer(self) -> TensorType:
        rows, width = _matrix(self, self.x)
        if self.rows == "R" and rows != "T":
            raise GraphError(
                "rows can be selected only from all tokens",
                where=self.name,
                got=self.x.type,
                wanted=f"f32[T,{width}]",
            )
        if width % A8_BLOCK:
            raise GraphError(
                "the width is not a number of A8 blocks",
                where=self.name,
                got=width,
                wanted=f"a multiple of {A8_BLOCK}",
            )
        return TensorType("a8", ("R" if self.rows == "R" else rows, width))

    def evaluate(self, step: Evaluation) -> Array:
        x = step[self.x]
        if self.rows == "R":
            x = x[step.logit_rows]
        if step.exact:
            return x
        q, d, _ = quantize_a8(x)
        return dequantize_a8(q, d)


class Logits(Operation):
    """Select the rows that need logits, then multiply by the output matrix's transpose.

    An operand of R rows has been selected already.
    """

    name = "logits"
    x = Operand("f32", "a8")
    weight = Operand(*WEIGHT_FORMATS, weight=True)
    rows = choice("R", default="R")

    def infer(self) -> TensorType:
        _, n_vocab = _product(self, self.x, self.weight)
        return TensorType("f32", (self.rows, n_vocab))

    def evaluate(self, step: Evaluation) -> Array:
        x = step[self.x]
        if self.x.type.shape[0] != "R":
            x = x[step.logit_rows]
        return x @ step[self.weight].T


OPS: Mapping[str, type[Operation]] = MappingProxyType(
    {
        op.name: op
        for op in (
            Normalize,
            Scale,
            Rmsnorm,
            Matmul,
            Rope,
            Attention,
            Add,
            Silu,
            Mul,
            Swiglu,
            Quantize,
            Logits,
        )
    }
)
"""Every op by its name."""


def _matrix(op: Operation, value: Value) -> tuple[Dim, int]:
    """The rows (often symbolic) and the width of a two-dimensional activation."""
    shape = value.type.shape
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise GraphError(
            "an operand is not a matrix of fixed width",
            where=op.name,
            got=f"{value}: {value.type}",
            wanted=f"{value.type.dtype}[T,D]",
        )
    return shape[0], shape[1]


def _product(op: Operation, x: Value, weight: Value) -> tuple[Dim, int]:
    """Rows and columns of x times the weight's transpose."""
    rows, width = _matrix(op, x)
    n_outputs, depth = _matrix(op, weight)
    if depth != width or not isinstance(n_outputs, int):
        raise GraphError(
            f"{weight} does not fit {x}: {x.type}",
            where=op.name,
            got=weight.type,
            wanted=f"{weight.type.dtype}[N,{width}]",
        )
    return rows, n_outputs


def _expect(op: Operation, name: str, value: Value, wanted: TensorType) -> None:
    if value.type != wanted:
        raise GraphError(
            f"operand '{name}' does not fit",
            where=op.name,
            got=f"{value}: {value.type}",
            wanted=wanted,
        )


def _normalized(x: Array, eps: float) -> Array:
    normalized: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normalized


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
        silu: Array = x / (1 + np.exp(-x))
    return silu
