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
from ignis.graph.ir.types import A8_BLOCK, BLOCK_FORMATS, WEIGHT_FORMATS, Dim, TensorType


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


class MatmulGroup(Operation):
    """Two or three matmuls that read one value: a result for each weight, biases added."""

    name = "matmul_group"
    x = Operand("f32", "a8")
    weight0 = Operand(*WEIGHT_FORMATS, weight=True)
    weight1 = Operand(*WEIGHT_FORMATS, weight=True)
    weight2 = OptionalOperand(*WEIGHT_FORMATS, weight=True)
    bias0 = OptionalOperand("f32", weight=True)
    bias1 = OptionalOperand("f32", weight=True)
    bias2 = OptionalOperand("f32", weight=True)

    @property
    def members(self) -> tuple[tuple[Value, Value | None], ...]:
        """The weight and the bias of each result, in order."""
        pairs = (
            (self.weight0, self.bias0), (self.weight1, self.bias1), (self.weight2, self.bias2)
        )  # fmt: skip
        return tuple((weight, bias) for weight, bias in pairs if weight is not None)

    def infer(self) -> tuple[TensorType, ...]:
        if self.weight2 is None and self.bias2 is not None:
            raise GraphError(
                "a bias without its weight", where=self.name, got=self.bias2, wanted="weight2"
            )
        if len({weight.type.dtype in BLOCK_FORMATS for weight, _ in self.members}) > 1:
            raise GraphError(
                "block-quantized and float weights read x in different forms",
                where=self.name,
                got=" and ".join(weight.type.dtype for weight, _ in self.members),
                wanted="weights of one kind",
            )
        types = []
        for weight, bias in self.members:
            rows, n_outputs = _product(self, self.x, weight)
            if bias is not None:
                _expect(self, "bias", bias, TensorType("f32", (n_outputs,)))
            types.append(TensorType("f32", (rows, n_outputs)))
        return tuple(types)

    def evaluate(self, step: Evaluation) -> tuple[Array, ...]:
        products = []
        for weight, bias in self.members:
            y = step[self.x] @ step[weight].T
            products.append(y if bias is None else y + step[bias])
        return tuple(products)


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
        _check_rope(self, self.x, self.factors)
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _rotated(self, step[self.x], step)


class Attention(Operation):
    """Store the step's keys and values, then attend causally within each token's own slot.

    Effect: the KV cache of `layer`. A token sees the positions up to its own, those of this step
    included. Query head h reads key head h // (H/K).
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

    @property
    def effect(self) -> str:
        return f"kv cache of layer {self.layer}"

    def infer(self) -> TensorType:
        rows = _check_heads(self, self.q)
        kv = TensorType("f32", (rows, self.n_kv_heads * self.head_dim))
        _expect(self, "k", self.k, kv)
        _expect(self, "v", self.v, kv)
        return self.q.type

    def evaluate(self, step: Evaluation) -> Array:
        _store(self, step, step[self.k], step[self.v])
        return _attended(self, step, step[self.q])


class RopeStore(Operation):
    """Rotate q and k as rope does, store the rotated keys and the values; gives the rotated q.

    Effect: the KV cache of `layer`.
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

    @property
    def effect(self) -> str:
        return f"kv cache of layer {self.layer}"

    def infer(self) -> TensorType:
        _check_rope(self, self.q, self.factors)
        _check_rope(self, self.k, self.factors)
        _expect(self, "v", self.v, self.k.type)
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

    def infer(self) -> TensorType:
        _check_heads(self, self.q)
        return self.q.type

    def evaluate(self, step: Evaluation) -> Array:
        return _attended(self, step, step[self.q])


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
            MatmulGroup,
            Rope,
            Attention,
            RopeStore,
            Attend,
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


def _check_rope(op: Rope | RopeStore, x: Value, factors: Value | None) -> None:
    """Raise GraphError unless x is a number of heads and `n_rot` fits one."""
    rows, width = _matrix(op, x)
    _expect_tokens(op, x, rows)
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
        _expect(op, "factors", factors, TensorType("f32", (op.n_rot // 2,)))


def _check_heads(op: Attention | Attend, q: Value) -> Dim:
    """The rows of q, whose heads must fit the attributes."""
    if op.n_heads % op.n_kv_heads:
        raise GraphError(
            "query heads can't be shared out to key heads",
            where=op.name,
            got=op.n_heads,
            wanted=f"a multiple of n_kv_heads {op.n_kv_heads}",
        )
    rows, _ = _matrix(op, q)
    _expect_tokens(op, q, rows)
    _expect(op, "q", q, TensorType("f32", (rows, op.n_heads * op.head_dim)))
    return rows


def _expect_tokens(op: Operation, x: Value, rows: Dim) -> None:
    """Positions and slots belong to tokens, not to rows that were selected from them."""
    if rows != "T":
        raise GraphError("the op needs a row a token", where=op.name, got=f"{x}: {x.type}",
                         wanted="T rows")  # fmt: skip


def _rotated(op: Rope | RopeStore, x: Array, step: Evaluation) -> Array:
    frequencies = rope_frequencies(op.base, op.n_rot, step.get(op.factors))
    angle = step.positions[:, None, None] * frequencies
    heads = x.reshape(len(x), -1, op.head_dim)
    half = op.n_rot // 2
    neox = op.style == "neox"
    first = slice(0, half) if neox else slice(0, op.n_rot, 2)
    second = slice(half, op.n_rot) if neox else slice(1, op.n_rot, 2)
    a, b = heads[..., first], heads[..., second]
    turned = heads.copy()
    turned[..., first] = a * np.cos(angle) - b * np.sin(angle)
    turned[..., second] = a * np.sin(angle) + b * np.cos(angle)
    return turned.reshape(x.shape)


def _store(op: Attention | RopeStore, step: Evaluation, k: Array, v: Array) -> None:
    """Write the step's keys and values to the cache of the op's layer."""
    for slot in np.unique(step.slots):
        rows = np.flatnonzero(step.slots == slot)
        step.cache.store(op.layer, int(slot), step.positions[rows], k[rows], v[rows])


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
    scores = np.where(visible, (by_head @ keys) * op.scale, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Array = (p @ vals) / p.sum(axis=-1, keepdims=True)
    return attended.transpose(2, 0, 1, 3).reshape(q.shape)


def _normalized(x: Array, eps: float) -> Array:
    normalized: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normalized


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
        silu: Array = x / (1 + np.exp(-x))
    return silu
