"""Random valid graphs of all ops, shapes around the vector widths, and what they are run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.gguf import BLOCKS
from ignis.graph.ir import Builder, Graph, TensorType, Value, verify
from ignis.graph.ir.ops import MatmulGroup, Route
from ignis.graph.ir.types import BLOCK_FORMATS, FLOAT_FORMATS

Array = NDArray[Any]
WIDTHS = (1, 7, 15, 16, 17, 31, 33, 48, 32, 64, 96, 160, 256)
HEADS = ((2, 1, 16), (3, 3, 32), (4, 2, 32), (6, 2, 48))  # H, K, C: groups of 2, 1, 2, 3
FORMATS = (*FLOAT_FORMATS, *(name for name in BLOCK_FORMATS if BLOCKS[name].encodable))
EXPERT_FORMATS = ("f32", "bf16", "q4_0", "q8_0")


@dataclass(frozen=True, slots=True)
class Case:
    """A graph with its weights (float32), inputs, tokens (slot, position) and wanted rows."""

    seed: int
    graph: Graph
    weights: dict[str, Array]
    inputs: dict[str, Array]
    tokens: tuple[tuple[int, int], ...]
    wanted: frozenset[int]

    def first(self, n_tokens: int) -> Case:
        """The same with fewer tokens."""
        inputs = {name: x[:n_tokens] for name, x in self.inputs.items()}
        wanted = frozenset(i for i in self.wanted if i < n_tokens)
        return replace(self, inputs=inputs, tokens=self.tokens[:n_tokens], wanted=wanted)


class _Maker:
    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.b = rng, Builder()
        self.weights: dict[str, Array] = {}
        self.values: list[Value] = []
        self.layer = -1
        self.heads = HEADS[int(rng.integers(len(HEADS)))]
        n_heads, n_kv_heads, c = self.heads
        picked = rng.choice(WIDTHS, 2, replace=False).tolist()
        self.widths = list(dict.fromkeys([*picked, n_heads * c, n_kv_heads * c]))
        self.style = self.pick(("neox", "interleaved"))
        self.n_rot = self.pick((c, c // 2))
        self.scaling = self.pick(({}, {"divisor": 4.0}, {
            "divisor": 8.0, "ramp_low": 1, "ramp_high": 3, "magnitude": 1.2}))  # fmt: skip
        # Each pair of limits is a kernel of its own, so there is one pair besides none.
        self.limits = self.pick(({}, {}, {"window": 5, "softcap": 20.0}))

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def value(self, width: int | None = None, rows: str | None = "T") -> Value | None:
        """An f32 value made before, the last ones more often."""
        fit = [v for v in self.values if v.type.dtype == "f32"
               and width in (None, v.type.shape[1]) and rows in (None, v.type.shape[0])]
        if not fit:
            return None
        return fit[-1 - min(int(self.rng.geometric(0.4)) - 1, len(fit) - 1)]

    def vector(self, n: int, kind: str) -> Value:
        numbers, splat = self.rng.normal(1 if kind == "gain" else 0, 0.4, n), None
        constant = {"gain": 1.0, "bias": -0.0, "factors": 1.0}[kind]
        if kind == "factors":
            numbers = np.abs(numbers) + 0.5
        if self.rng.random() < 0.2:
            numbers, splat = np.full(n, constant), constant
        name = f"{kind}{len(self.weights)}"
        self.weights[name] = numbers.astype(np.float32)
        return self.b.weight(name, TensorType("f32", (n,)), splat)

    def matrix(
        self, n_outputs: int, n_inputs: int, dtype: str | None = None, n_experts: int = 0
    ) -> Value:
        # Each format of experts is four more kernels to compile, so there are few.
        fit = [f for f in (EXPERT_FORMATS if n_experts else FORMATS)
               if n_inputs % max(BLOCKS[f].block_size, 1) == 0
               and (f in FLOAT_FORMATS or n_inputs % 32 == 0)]  # fmt: skip
        if dtype is not None:
            fit = [f for f in fit if (f in BLOCK_FORMATS) == (dtype in BLOCK_FORMATS)]
        format = self.pick(fit)
        name = f"w{len(self.weights)}"
        shape = (n_experts, n_outputs, n_inputs) if n_experts else (n_outputs, n_inputs)
        numbers = self.rng.normal(0, 1 / np.sqrt(n_inputs), shape)
        self.weights[name] = numbers.astype(np.float32)
        return self.b.weight(name, TensorType(format, shape))

    def project(self, width: int) -> Value:
        """A value of that width, by a matmul if there is none."""
        found = self.value(width)
        if found is not None and self.rng.random() < 0.5:
            return found
        x = self.value()
        assert x is not None
        return self.keep(self.b.matmul(x, self.matrix(width, int(x.type.shape[1]))))

    def keep(self, value: Value) -> Value:
        self.values.append(value)
        return value

    def op(self) -> None:
        kind = self.pick((
            "normalize", "scale", "rmsnorm", "silu", "gelu", "add", "mul", "swiglu", "geglu",
            "scale_by", "columns", "matmul", "matmul", "group", "quantized", "rope", "attention",
            "roped", "stored", "logits", "block", "again", "experts", "row_gate",
        ))  # fmt: skip
        getattr(self, f"_{kind}")()

    def _grouped(self, x: Value) -> tuple[int, dict[str, Any]]:
        """The elements that are normalized together, and the attribute for it."""
        width, c = int(x.type.shape[1]), self.heads[2]
        if width % c == 0 and self.rng.random() < 0.4:
            return c, {"group": c}
        return width, {}

    def _normalize(self) -> None:
        x = self.value(rows=None)
        self.keep(self.b.normalize(x, eps=1e-5, **self._grouped(x)[1]))

    def _scale(self) -> None:
        x = self.value(rows=None)
        n, group = self._grouped(x)
        self.keep(self.b.scale(x, self.vector(n, "gain"), **group))

    def _rmsnorm(self) -> None:
        x = self.value(rows=None)
        n, group = self._grouped(x)
        self.keep(self.b.rmsnorm(x, self.vector(n, "gain"), eps=1e-6, **group))

    def _silu(self) -> None:
        self.keep(self.b.silu(self.value(rows=None)))

    def _gelu(self) -> None:
        self.keep(self.b.gelu(self.value(rows=None)))

    def _geglu(self) -> None:
        self._pair("geglu")

    def _scale_by(self) -> None:
        self.keep(self.b.scale_by(self.value(rows=None), factor=self.pick((0.3, 1.0, 12.0))))

    def _columns(self) -> None:
        x = self.value(rows=None)
        first = int(self.rng.integers(0, int(x.type.shape[1])))
        width = int(self.rng.integers(1, int(x.type.shape[1]) - first + 1))
        self.keep(self.b.columns(x, first=first, width=width))

    def _pair(self, name: str) -> None:
        x = self.value(rows=None)
        y = self.value(int(x.type.shape[1]), x.type.shape[0])
        self.keep(getattr(self.b, name)(x, y))

    def _add(self) -> None:
        self._pair("add")

    def _mul(self) -> None:
        self._pair("mul")

    def _swiglu(self) -> None:
        self._pair("swiglu")

    def _matmul(self) -> None:
        x = self.value(rows=None)
        width = self.pick(self.widths)
        bias = self.vector(width, "bias") if self.rng.random() < 0.4 else None
        residual = self.value(width, x.type.shape[0]) if self.rng.random() < 0.4 else None
        weight = self.matrix(width, int(x.type.shape[1]))
        y = self.keep(self.b.matmul(x, weight, bias=bias, residual=residual))
        other = self.value(width, x.type.shape[0])
        if other is not None and self.rng.random() < 0.3:
            self.keep(self.b.add(other, y))

    def _group(self) -> None:
        x = self.value(rows=None)
        first = self.matrix(self.pick(self.widths), int(x.type.shape[1]))
        weights = [first, *(self.matrix(self.pick(self.widths), int(x.type.shape[1]),
                                        first.type.dtype) for _ in range(self.pick((1, 2))))]
        biases = {f"bias{i}": self.vector(int(w.type.shape[0]), "bias")
                  for i, w in enumerate(weights) if self.rng.random() < 0.4}
        named = {f"weight{i}": w for i, w in enumerate(weights)}
        self.values += self.b.emit(MatmulGroup, x=x, **named, **biases).results

    def _quantized(self) -> None:
        """An explicit quantize, read by a matmul of a block format."""
        widths = [w for w in self.widths if w % 32 == 0 and self.value(w) is not None]
        if widths:
            x = self.value(self.pick(widths))
            a8 = self.b.quantize(x, rows=self.pick(("T", "R")))
            weight = self.matrix(self.pick(self.widths), int(a8.type.shape[1]), "q8_0")
            self.keep(self.b.matmul(a8, weight))

    def _turned(self, x: Value, factors: Value | None) -> Value:
        return self.b.rope(x, factors=factors, **self._turn())

    def _turn(self) -> dict[str, Any]:
        return {"style": self.style, "head_dim": self.heads[2], "n_rot": self.n_rot, "base": 1e4,
                **self.scaling}  # fmt: skip

    def _factors(self) -> Value | None:
        return self.vector(self.n_rot // 2, "factors") if self.rng.random() < 0.3 else None

    def _rope(self) -> None:
        x = self.project(self.heads[0] * self.heads[2])
        self.keep(self._turned(x, self._factors()))

    def _projections(self) -> tuple[Value, Value, Value]:
        n_heads, n_kv_heads, c = self.heads
        self.layer += 1
        if self.rng.random() < 0.5:
            x = self.value()
            return tuple(self.keep(self.b.matmul(x, self.matrix(n * c, int(x.type.shape[1]))))
                         for n in (n_heads, n_kv_heads, n_kv_heads))  # type: ignore[return-value]
        kv = [self.project(n_kv_heads * c) for _ in range(2)]
        return self.project(n_heads * c), kv[0], kv[1]

    def _heads(self) -> dict[str, Any]:
        n_heads, n_kv_heads, c = self.heads
        return {"layer": self.layer, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": c,
                "scale": c**-0.5, **self.limits}  # fmt: skip

    def _attention(self) -> None:
        q, k, v = self._projections()
        self.keep(self.b.attention(q, k, v, **self._heads()))

    def _roped(self) -> None:
        q, k, v = self._projections()
        factors = self._factors()
        q, k = self._turned(q, factors), self._turned(k, factors)
        self.keep(self.b.attention(q, k, v, **self._heads()))

    def _stored(self) -> None:
        q, k, v = self._projections()
        turned = self.b.rope_store(q, k, v, factors=self._factors(), layer=self.layer,
                                   **self._turn())  # fmt: skip
        self.keep(self.b.attend(self.keep(turned), **self._heads()))

    def _logits(self) -> None:
        x = self.value(rows=self.pick(("T", None)))
        weight = self.matrix(self.pick((1, 5, 16, 40)), int(x.type.shape[1]))
        capped = {"softcap": 30.0} if self.rng.random() < 0.3 else {}
        self.keep(self.b.logits(x, weight, **capped))

    def _block(self) -> None:
        """A gated block as models have it."""
        x = self.value()
        width, hidden = int(x.type.shape[1]), self.pick(self.widths)
        normed = self.b.scale(self.b.normalize(x, eps=1e-6), self.vector(width, "gain"))
        gate, up = (self.b.matmul(normed, self.matrix(hidden, width)) for _ in range(2))
        unit = self.pick((self.b.silu, self.b.gelu))
        down = self.b.matmul(self.b.mul(unit(gate), up), self.matrix(width, hidden))
        self.keep(self.b.add(x, down))

    def _experts(self) -> None:
        """A mixture of experts, sometimes without a hidden layer."""
        x = self.value(rows=None)
        rows, width = x.type.shape
        n_experts = self.pick((1, 2, 5, 17))
        n_used = int(self.rng.integers(1, min(n_experts, 4) + 1))
        scores = self.keep(self.b.matmul(x, self.matrix(n_experts, width)))
        scale = self.pick(({}, {"scale": 1.5}))
        experts, gates = self.b.emit(
            Route, scores, n_used=n_used, among=self.pick(("all", "chosen")), **scale).results
        hidden = self.pick(self.widths)
        up = self.b.expert_matmul(x, experts, self.matrix(hidden, width, n_experts=n_experts))
        residual = self.value(rows=rows)
        out = int(residual.type.shape[1])
        down = self.matrix(out, hidden, n_experts=n_experts)
        self.values += [gates, self.keep(up)]
        self.keep(self.b.expert_sum(self.b.silu(up), experts, gates, down, residual))

    def _row_gate(self) -> None:
        x = self.value(rows=None)
        branch = self.value(rows=x.type.shape[0])
        weight = self.vector(int(x.type.shape[1]), "gain")
        self.keep(self.b.row_gate(branch, x, weight))

    def _again(self) -> None:
        """What an op of one operand computes already."""
        x = self.value(rows=None)
        self.values += [self.b.silu(x), self.b.silu(x)]


def random_case(seed: int) -> Case:
    """The case of that number: the same on every machine."""
    rng = np.random.default_rng([seed, 4])
    make = _Maker(rng)
    n_inputs = int(rng.integers(1, 3))
    for i in range(n_inputs):
        make.keep(make.b.input(f"x{i}", TensorType("f32", ("T", make.widths[i]))))
    n_ops = int(rng.integers(1, 21))
    while len(make.b._operations) < n_ops:
        make.op()
    results = [v for op in make.b._operations for v in op.results if v.type.dtype == "f32"]
    n_outputs = min(int(rng.integers(1, 4)), len(results))
    chosen = rng.choice(len(results), n_outputs, replace=False)
    outputs = {results[-1], *(results[i] for i in chosen)} if rng.random() < 0.8 else {
        results[i] for i in chosen}
    graph = make.b.finish(*sorted(outputs, key=lambda v: int(v.name)))
    verify(graph)
    n_tokens = int(rng.choice([1, 2, 3, 5, 12, 13, 17, 30]))
    tokens, lengths = [], [0, 0, 0]
    for _ in range(n_tokens):
        slot = int(rng.integers(0, 3)) if rng.random() < 0.3 else 0
        tokens.append((slot, lengths[slot]))
        lengths[slot] += 1
    inputs = {v.name: _rows(rng, n_tokens, int(v.type.shape[1])) for v in graph.inputs}
    wanted = frozenset(i for i in range(n_tokens) if rng.random() < 0.4)
    weights = {name: make.weights[name] for name in graph.weights}
    return Case(seed, graph, weights, inputs, tuple(tokens), wanted)


def _rows(rng: np.random.Generator, n_tokens: int, width: int) -> Array:
    x = rng.normal(0, 10.0 ** rng.integers(-2, 2), (n_tokens, width))
    if rng.random() < 0.15:
        x[rng.integers(n_tokens)] = 0
    return x.astype(np.float32)
