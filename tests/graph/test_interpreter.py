"""The oracle itself, against plain loops over numbers: an error here would excuse one elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from ignis.errors import GraphError
from ignis.graph.ir import Graph, parse_graph, print_graph
from ignis.graph.ir.a8 import dequantize_a8, quantize_a8
from ignis.graph.ir.interpreter import ReferenceCache, interpret

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(7)
W = {
    "w": RNG.normal(size=(3, 64)),
    "bias": RNG.normal(size=3),
    "gain": RNG.normal(size=64),
    "small": np.linspace(0.5, 2, 16),
    "factors": np.array([1.0, 2.0, 4.0, 8.0]),
}
X, Y = RNG.normal(size=(2, 4, 64))


def _graph(line: str, weights: str = "") -> Graph:
    inputs = "%x: f32[T,64], %y: f32[T,64]"
    declared = f"weights {{\n{weights}\n}}\n" if weights else ""
    return parse_graph(f"graph({inputs}) {{\n{declared}%r = {line}\nreturn %r\n}}")


def _run(
    graph: Graph,
    inputs: Mapping[str, Array] | None = None,
    *,
    positions: list[int] | None = None,
    slots: list[int] | None = None,
    rows: list[int] | None = None,
    cache: ReferenceCache | None = None,
    **options: Any,
) -> Array:
    inputs = {"x": X, "y": Y} if inputs is None else inputs
    n_tokens = len(next(iter(inputs.values())))
    (out,) = interpret(
        graph,
        inputs,
        W.__getitem__,
        ReferenceCache() if cache is None else cache,
        np.array(range(n_tokens) if positions is None else positions),
        np.array([0] * n_tokens if slots is None else slots),
        np.array([0] if rows is None else rows),
        **options,
    )
    return out


def _silu(v: float) -> float:
    return v / (1 + math.exp(-v))


def _gelu(v: float) -> float:
    return v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def _rms(row: Array) -> float:
    return math.sqrt(sum(v * v for v in row) / len(row) + 1e-5)


ELEMENTWISE: dict[str, tuple[str, str, Callable[[int, int], float]]] = {
    "add": ("add(%x, %y) : f32[T,64]", "", lambda t, i: X[t, i] + Y[t, i]),
    "mul": ("mul(%x, %y) : f32[T,64]", "", lambda t, i: X[t, i] * Y[t, i]),
    "silu": ("silu(%x) : f32[T,64]", "", lambda t, i: _silu(X[t, i])),
    "swiglu": ("swiglu(%x, %y) : f32[T,64]", "", lambda t, i: _silu(X[t, i]) * Y[t, i]),
    "gelu": ("gelu(%x) : f32[T,64]", "", lambda t, i: _gelu(X[t, i])),
    "geglu": ("geglu(%x, %y) : f32[T,64]", "", lambda t, i: _gelu(X[t, i]) * Y[t, i]),
    "scale_by": ("scale_by(%x) {factor = 2.5} : f32[T,64]", "", lambda t, i: X[t, i] * 2.5),
    "heads normalized": (
        "normalize(%x) {eps = 1e-05, group = 16} : f32[T,64]",
        "",
        lambda t, i: X[t, i] / _rms(X[t, i // 16 * 16 : i // 16 * 16 + 16]),
    ),
    "heads scaled": (
        "scale(%x, @small) {group = 16} : f32[T,64]",
        "@small: f32[16]",
        lambda t, i: X[t, i] * W["small"][i % 16],
    ),
    "heads normalized and scaled": (
        "rmsnorm(%x, @small) {eps = 1e-05, group = 16} : f32[T,64]",
        "@small: f32[16]",
        lambda t, i: X[t, i] / _rms(X[t, i // 16 * 16 : i // 16 * 16 + 16]) * W["small"][i % 16],
    ),
    "scale": (
        "scale(%x, @gain) : f32[T,64]", "@gain: f32[64]", lambda t, i: X[t, i] * W["gain"][i],
    ),
    "normalize": (
        "normalize(%x) {eps = 1e-05} : f32[T,64]", "", lambda t, i: X[t, i] / _rms(X[t]),
    ),
    "rmsnorm": (
        "rmsnorm(%x, @gain) {eps = 1e-05} : f32[T,64]",
        "@gain: f32[64]",
        lambda t, i: X[t, i] / _rms(X[t]) * W["gain"][i],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rowwise_ops(name: str) -> None:
    line, weights, meaning = ELEMENTWISE[name]
    wanted = [[meaning(t, i) for i in range(64)] for t in range(len(X))]
    np.testing.assert_allclose(_run(_graph(line, weights)), wanted, rtol=1e-13)


def _dot(a: Array, b: Array) -> float:
    return math.fsum(u * v for u, v in zip(a, b, strict=True))


def test_matmul_adds_bias_and_residual() -> None:
    weights = "@w: f16[3,64]\n@bias: f32[3]"
    graph = parse_graph(
        f"graph(%x: f32[T,64], %y: f32[T,3]) {{\nweights {{\n{weights}\n}}\n"
        "%r = matmul(%x, @w, bias=@bias, residual=%y) : f32[T,3]\nreturn %r\n}"
    )
    residual = Y[:, :3]
    wanted = [
        [_dot(X[t], W["w"][n]) + W["bias"][n] + residual[t, n] for n in range(3)] for t in range(4)
    ]
    np.testing.assert_allclose(_run(graph, {"x": X, "y": residual}), wanted, rtol=1e-12)


def test_logits_are_of_the_chosen_rows_in_their_order() -> None:
    graph = _graph('logits(%x, @w) {rows = "R"} : f32[R,3]', "@w: f32[3,64]")
    out = _run(graph, rows=[3, 1])
    wanted = [[_dot(X[t], W["w"][n]) for n in range(3)] for t in (3, 1)]
    np.testing.assert_allclose(out, wanted, rtol=1e-12)


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("factors", [False, True])
def test_rope_turns_pairs_and_leaves_the_rest(style: str, factors: bool) -> None:
    operands = "%x, factors=@factors" if factors else "%x"
    attributes = f'{{style = "{style}", head_dim = 16, n_rot = 8, base = 100.0}}'
    weights = "@factors: f32[4]" if factors else ""
    out = _run(
        _graph(f"rope({operands}) {attributes} : f32[T,64]", weights), positions=[0, 1, 7, 900]
    )
    wanted = X.copy()
    for t, position in enumerate([0, 1, 7, 900]):
        for head in range(4):
            for i in range(4):
                angle = position * 100.0 ** (-2 * i / 8) / (W["factors"][i] if factors else 1)
                a, b = (i, i + 4) if style == "neox" else (2 * i, 2 * i + 1)
                u, v = X[t, 16 * head + a], X[t, 16 * head + b]
                wanted[t, 16 * head + a] = u * math.cos(angle) - v * math.sin(angle)
                wanted[t, 16 * head + b] = u * math.sin(angle) + v * math.cos(angle)
    np.testing.assert_allclose(out, wanted, rtol=1e-10, atol=1e-12)


def test_columns_are_a_part_of_each_row() -> None:
    out = _run(_graph("columns(%x) {first = 5, width = 7} : f32[T,7]"))
    assert np.array_equal(out, X[:, 5:12])
    with pytest.raises(GraphError, match="columns outside the operand: got 60 to 65"):
        _graph("columns(%x) {first = 60, width = 5} : f32[T,5]")


@pytest.mark.parametrize("line", [
    "normalize(%x) {eps = 1e-05, group = 24} : f32[T,64]",
    "scale(%x, @gain) {group = 16} : f32[T,64]",
])  # fmt: skip
def test_groups_must_fit(line: str) -> None:
    with pytest.raises(GraphError, match=r"not a number of groups|operand 'gain' does not fit"):
        _graph(line, "@gain: f32[64]" if "gain" in line else "")


def test_no_rows_are_normalized_to_no_rows() -> None:
    """A step without logits may leave a norm nothing to do."""
    graph = _graph("rmsnorm(%x, @small) {eps = 1e-05, group = 16} : f32[T,64]", "@small: f32[16]")
    nothing = np.zeros((0, 64))
    assert _run(graph, {"x": nothing, "y": nothing}, rows=[]).shape == (0, 64)


def test_logits_can_be_capped() -> None:
    graph = _graph('logits(%x, @w) {rows = "R", softcap = 3.0} : f32[R,3]', "@w: f32[3,64]")
    wanted = [[3 * math.tanh(_dot(X[2], W["w"][n]) / 3) for n in range(3)]]
    np.testing.assert_allclose(_run(graph, rows=[2]), wanted, rtol=1e-12)


def test_rope_can_be_stretched() -> None:
    """Pairs below the ramp turn as they did, those above it slower, and all grow."""
    attributes = ('{style = "neox", head_dim = 64, n_rot = 64, base = 100.0, divisor = 4.0, '
                  "ramp_low = 4, ramp_high = 12, magnitude = 1.5}")  # fmt: skip
    out = _run(_graph(f"rope(%x) {attributes} : f32[T,64]"), positions=[0, 1, 7, 900])
    for t, position in enumerate([0, 1, 7, 900]):
        for i, share in ((0, 0.0), (4, 0.0), (6, 0.25), (8, 0.5), (12, 1.0), (31, 1.0)):
            angle = position * 100.0 ** (-2 * i / 64) * (share / 4 + 1 - share)
            u, v = X[t, i], X[t, i + 32]
            wanted = 1.5 * (u * math.cos(angle) - v * math.sin(angle))
            assert out[t, i] == pytest.approx(wanted, rel=1e-9, abs=1e-11)


ATTENTION = parse_graph("""
graph(%q: f32[T,64], %k: f32[T,32], %v: f32[T,32]) {
  %r = attention(%q, %k, %v) {layer = 3, n_heads = 4, n_kv_heads = 2, head_dim = 16, scale = 0.25} : f32[T,64]
  return %r
}
""")  # noqa: E501  # one operation a line


def _attention_by_loops(
    q: Array, k: Array, v: Array, window: int = 99, cap: Callable[[float], float] = float
) -> Array:
    """One sequence from position 0, head by head and token by token."""
    out = np.zeros_like(q)
    for t in range(len(q)):
        for h in range(4):
            mine = slice(16 * h, 16 * h + 16)
            key = slice(16 * (h // 2), 16 * (h // 2) + 16)
            seen = range(max(0, t + 1 - window), t + 1)
            weights = [math.exp(cap(_dot(q[t, mine], k[s, key]) * 0.25)) for s in seen]
            for s, weight in zip(seen, weights, strict=True):
                out[t, mine] += weight / math.fsum(weights) * v[s, key]
    return out


def _qkv(n: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {"q": 64, "k": 32, "v": 32}
    return {name: rng.normal(size=(n, width)) for name, width in shapes.items()}


def test_attention_is_causal_and_grouped() -> None:
    qkv = _qkv(9)
    np.testing.assert_allclose(_run(ATTENTION, qkv), _attention_by_loops(**qkv), rtol=1e-11)


@pytest.mark.parametrize("window", [1, 4, 9])
def test_attention_in_a_window_with_capped_scores(window: int) -> None:
    qkv = _qkv(9, 5)
    limits = f"scale = 0.25, window = {window}, softcap = 0.5"
    graph = parse_graph(print_graph(ATTENTION).replace("scale = 0.25", limits))
    wanted = _attention_by_loops(**qkv, window=window, cap=lambda s: 0.5 * math.tanh(s / 0.5))
    np.testing.assert_allclose(_run(graph, qkv), wanted, rtol=1e-11)


def test_sequences_in_one_batch_and_in_chunks_do_not_mix() -> None:
    """A slot that saw another's keys, or a chunk that missed its past."""
    first, second = _qkv(6, 1), _qkv(5, 2)
    cache = ReferenceCache()
    outs: dict[int, list[Array]] = {4: [], 9: []}
    for lo, hi in ((0, 2), (2, 3), (3, 5)):
        step = {n: np.concatenate([second[n][lo:hi], first[n][lo:hi]])[::-1] for n in first}
        positions = [*range(lo, hi), *range(lo, hi)][::-1]
        slots = ([9] * (hi - lo) + [4] * (hi - lo))[::-1]
        out = _run(ATTENTION, step, positions=positions, slots=slots, cache=cache)
        outs[4].append(out[: hi - lo][::-1])
        outs[9].append(out[hi - lo :][::-1])
    for slot, whole in ((4, first), (9, second)):
        wanted = _attention_by_loops(**whole)[:5]
        np.testing.assert_allclose(np.concatenate(outs[slot]), wanted, rtol=1e-11)


def test_a_position_never_stored_shows_as_nan() -> None:
    out = _run(ATTENTION, _qkv(1), positions=[2])
    assert np.isnan(out).all()


def test_f16_cache_rounds_through_f32() -> None:
    cache = ReferenceCache(rounded=True)
    keys = np.array([[1 + 2.0**-11 + 2.0**-40, 1e6]])  # f32 drops 2^-40, then f16 ties to even
    cache.store(0, 0, np.array([0]), keys, keys, "f16")
    assert cache.read(0, 0, 1)[0].tolist() == [[1.0, math.inf]]
    cache.clear(0)
    with pytest.raises(KeyError):
        cache.read(0, 0, 1)


def test_quantize_is_exact_or_rounds_as_told() -> None:
    graph = _graph('quantize(%x) {rows = "T"} : a8[T,64]')
    np.testing.assert_array_equal(_run(graph), X)
    q, d, _ = quantize_a8(X)
    np.testing.assert_array_equal(_run(graph, exact=False), dequantize_a8(q, d))
    assert 0 < np.abs(_run(graph, exact=False) - X).max() <= d.max() * 0.5001


def test_quantize_may_select_the_rows_of_logits() -> None:
    graph = parse_graph("""
    graph(%x: f32[T,64]) {
      weights {
        @w: f32[3,64]
      }
      %0 = quantize(%x) {rows = "R"} : a8[R,64]
      %1 = logits(%0, @w) {rows = "R"} : f32[R,3]
      return %0, %1
    }
    """)
    table = np.arange(4), np.zeros(4, dtype=int), np.array([3, 1])
    quantized, logits = interpret(graph, {"x": X}, W.__getitem__, ReferenceCache(), *table)
    np.testing.assert_array_equal(quantized, X[[3, 1]])
    np.testing.assert_array_equal(logits, X[[3, 1]] @ W["w"].T)


def test_a8_blocks_by_scalars() -> None:
    """NUMERICS 1, one block at a time: the scale, rounding half to even, the sum."""
    x = (RNG.normal(size=(5, 96)) * 10.0 ** RNG.integers(-8, 8, (5, 1))).astype(np.float32)
    x[0, :32] = np.arange(32) - 15.5  # ties
    x[0, 0] = 127
    q, d, s = quantize_a8(x)
    for row in range(5):
        for block in range(3):
            values = x[row, 32 * block : 32 * block + 32]
            amax = max(abs(v) for v in values)
            inverse = np.float32(127) / amax
            wanted = [round(float(np.float32(v * inverse))) for v in values]
            assert q[row, 32 * block : 32 * block + 32].tolist() == wanted
            assert d[row, block] == np.float32(amax / np.float32(127))
            assert s[row, block] == sum(wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a8_marks_blocks_that_are_not_finite(bad: float) -> None:
    """A NaN that came out as a number would hide a broken model."""
    x = np.ones((1, 64), dtype=np.float32)
    x[0, 40] = bad
    q, d, s = quantize_a8(x)
    assert np.isnan(d[0, 1]) and not q[0, 32:].any() and s[0, 1] == 0
    assert np.isnan(dequantize_a8(q, d)[0, 32:]).all()
    assert (q[0, :32] == 127).all()


def test_a8_of_tiny_values_is_zero() -> None:
    x = np.full((1, 64), 2.0**-101, dtype=np.float32)
    x[0, 32] = 2.0**-100
    q, d, _ = quantize_a8(x)
    assert d[0, 0] == 0 and d[0, 1] > 0
    assert not q[0, :32].any()
    assert q[0, 32] == 127


def test_values_are_observed_in_order() -> None:
    seen = []
    _run(_graph("add(%x, %y) : f32[T,64]"), observe=lambda v, a: seen.append((str(v), a.shape)))
    assert seen == [("%r", (4, 64))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": [0, 1, 2, 2]}, "same slot and position"),
        ({"positions": [0, 1, 2, -1]}, "negative number"),
        ({"slots": [0]}, "a slot for each token: got 1, wanted 4"),
        ({"rows": [4]}, "lies outside the step: got 4, wanted below 4"),
        ({"positions": [0.5, 1, 2, 3]}, "not a list of integers"),
        ({"inputs": {"x": X}}, "%y: an input is missing"),
        ({"inputs": {"x": X, "y": X[:, :63]}}, "%y: an input has the wrong shape"),
    ],
)
def test_bad_steps_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        _run(_graph("add(%x, %y) : f32[T,64]"), **change)


def test_misshapen_weights_are_refused() -> None:
    with pytest.raises(GraphError, match="@w: a weight's array has the wrong shape"):
        _run(_graph("matmul(%x, @w) : f32[T,5]", "@w: f32[5,64]"))


def test_masked_values_count_for_nothing() -> None:
    """A value beyond f16 in a later token, an infinity in the cache, made NaNs of earlier ones."""
    graph = parse_graph("""
    graph(%q: f32[T,2], %v: f32[T,2]) {
      %0 = attention(%q, %q, %v) {layer = 0, n_heads = 1, n_kv_heads = 1, head_dim = 2, scale = 1} : f32[T,2]
      return %0
    }
    """)  # noqa: E501
    inputs = {"q": np.ones((2, 2)), "v": np.array([[1.0, 2.0], [1e6, 1.0]])}
    table = np.arange(2), np.zeros(2, dtype=int), np.arange(0)
    (out,) = interpret(graph, inputs, {}.__getitem__, ReferenceCache(rounded=True), *table)
    assert out[0].tolist() == [1.0, 2.0]
    assert out[1].tolist() == [np.inf, 1.5]
