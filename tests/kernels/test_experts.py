"""Routing and the experts' matmuls: eager twin and machine code agree, and are what they say.

What would be broken: a token goes to an expert that it has not chosen, or two threads disagree
about which it has.
"""

from __future__ import annotations

import numpy as np
import pytest

from ignis.gguf import BLOCKS
from ignis.graph.ir.types import experts_nbytes
from ignis.kernels import matmul, matmul_experts, matmul_float, panels, routing
from ignis.kernels.eager import fma_f32
from ignis.kernels.quantize import quantize
from tests.kernels.helpers import Array, assert_same_bits, hostile_floats, levels, run

ROWS = np.arange(1024, dtype=np.int32)
RNG = np.random.default_rng(0)


def _route(
    logits: Array, n_used: int, level: str, among: str = "chosen", scale: float = 1.0
) -> tuple[Array, Array]:
    """The tables and the gates of all tokens."""
    n_tokens, n_experts = logits.shape
    tables = np.zeros(experts_nbytes(n_tokens, n_used) // 4, np.int32)
    args = {"experts": tables, "n_experts": n_experts, "n_used": n_used, "n_tokens": n_tokens}
    out = run(
        routing.route(among=among), level,
        args | {"logits": logits, "gates": np.zeros((n_tokens, n_used), np.float32),
                "scale": scale},
        n_tokens, ["experts", "gates"], routing.route_scratch_nbytes(n_experts),
    )  # fmt: skip
    args["experts"] = out["experts"]
    grouped = run(routing.group_experts(), level, args, 1, ["experts"], 8 * n_experts)
    return grouped["experts"], out["gates"]


def _entries(tables: Array, n: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Each expert that is chosen, with its tokens and their slots."""
    entries, active, starts = tables[n : 3 * n].reshape(n, 2), tables[3 * n :], tables[4 * n :]
    n_active = int(tables[5 * n + 1])
    return [
        (int(active[a]), [(int(t), int(j)) for t, j in entries[starts[a] : starts[a + 1]]])
        for a in range(n_active)
    ]


@pytest.mark.parametrize("level", ["eager", *levels()])
@pytest.mark.parametrize(("n_experts", "n_used"), [(1, 1), (8, 2), (16, 16), (17, 3), (60, 4)])
def test_the_best_are_chosen_in_order(n_experts: int, n_used: int, level: str) -> None:
    """Few values, so ties: the lower index wins; both zeros are one value."""
    values = np.array([-1.5, -0.0, 0.0, 0.25, 3.0], np.float32)
    for n_tokens in (1, 7):
        logits = np.random.default_rng(n_experts).choice(values, (n_tokens, n_experts))
        tables, gates = _route(logits, n_used, level)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :n_used]
        chosen = tables[: n_tokens * n_used].reshape(n_tokens, n_used)
        assert np.array_equal(chosen, np.sort(order, axis=1))
        wanted = [
            (e, [(int(t), int(j)) for t, j in np.argwhere(chosen == e)]) for e in np.unique(chosen)
        ]
        assert _entries(tables, n_tokens * n_used) == wanted
        assert np.abs(gates.sum(axis=1) - 1).max() < 1e-6


def test_gates_are_probabilities() -> None:
    logits = RNG.normal(0, 2, (5, 19)).astype(np.float32)
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    best = np.sort(np.argsort(-logits, axis=1)[:, :3], axis=1)
    wanted = np.take_along_axis(p, best, axis=1)
    for among, exact in (("all", wanted), ("chosen", wanted / wanted.sum(1, keepdims=True))):
        for scale in (1.0, 2.5):
            eager, native = (_route(logits, 3, level, among, scale)[1] for level in
                             ("eager", "host"))  # fmt: skip
            assert_same_bits(native, eager, f"gates among {among}")
            assert np.abs(eager / (exact * scale) - 1).max() < 1e-6


@pytest.mark.parametrize("n_experts", [4, 16, 33])
def test_logits_that_are_no_numbers(n_experts: int) -> None:
    """The chosen ones are always experts that there are, each once, so nothing reads elsewhere."""
    logits = hostile_floats(np.random.default_rng(2), 40 * n_experts).reshape(40, n_experts)
    tables, gates = _route(logits, 3, "eager")
    chosen = tables[: 40 * 3].reshape(40, 3)
    assert chosen.min() >= 0 and chosen.max() < n_experts and (np.diff(chosen, axis=1) > 0).all()
    assert np.isnan(gates[np.isnan(logits).any(axis=1)]).all(), "what is no number must show"
    for level in levels():
        got = _route(logits, 3, level)
        assert np.array_equal(got[0], tables)
        assert_same_bits(got[1], gates, level)


def test_row_gate() -> None:
    x, w, branch = (RNG.normal(size=s).astype(np.float32) for s in ((5, 37), 37, (5, 21)))
    args = {"branch": branch, "x": x, "weight": w, "y": branch, "n": 21, "n_values": 37}
    eager, *others = (run(routing.row_gate(), level, args, 5, ["y"])["y"]
                      for level in ("eager", *levels()))  # fmt: skip
    assert np.abs(eager - branch / (1 + np.exp(-(x @ w)))[:, None]).max() < 1e-5
    for other in others:
        assert_same_bits(other, eager, "row_gate")


def _quantized(x: Array) -> Array:
    n_rows, n = x.shape
    y = np.zeros(n_rows * n // 32 * 48, np.uint8)
    args = {"x": x, "y": y, "rows": ROWS, "n": n, "n_rows": n_rows}
    return run(quantize(), "host", args, n_rows, ["y"])["y"]


def _outputs(fmt: str, rows: Array, x: Array, n_rows: int) -> Array:
    """The plain matmul of x [T, K] with one expert's rows: the bits that are wanted."""
    n_tokens, n_values = x.shape
    args = {"weight": rows, "y": np.zeros((n_tokens, n_rows), np.float32), "bias": None,
            "residual": None, "n_rows": n_rows, "n_values": n_values, "n_tokens": n_tokens}
    if fmt in panels.FORMATS:
        scratch = matmul.scratch_nbytes(fmt, n_values)
        kernel, units = matmul.matmul_mapped(format=fmt), -(-n_rows // 16)
        return run(kernel, "host", args | {"x": _quantized(x)}, units, ["y"], scratch)["y"]
    args |= {"x": x, "rows": ROWS, "unit_rows": n_rows + (-n_rows) % 4}
    return run(matmul_float.matmul_float(format=fmt), "host", args, 1, ["y"],
               matmul_float.scratch_nbytes(n_values))["y"]  # fmt: skip


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("fmt", ["f32", "bf16", "q8_0", "q4_k"])
def test_each_token_meets_its_experts(fmt: str, summed: bool) -> None:
    """Outputs are those of plain matmuls, summed in ascending order: mapped, packed, eager."""
    n_experts, n_used, n_rows = 4, 2, 21
    n_values = 2 * max(BLOCKS[fmt].block_size, 16) + (4 if BLOCKS[fmt].block_size == 1 else 0)
    numbers = RNG.normal(0, 0.2, (n_experts, n_rows, n_values)).astype(np.float32)
    if BLOCKS[fmt].encodable:
        rows = BLOCKS[fmt].encode(numbers).reshape(n_experts, -1)
    else:
        rows = RNG.integers(0, 96, (n_experts, n_rows * n_values // 256 * 144), dtype=np.uint8)
    for n_tokens in (1, 2, 5, 2 * matmul.PASS_TOKENS):  # the last: two passes of an expert
        logits = RNG.normal(size=(n_tokens, n_experts)).astype(np.float32)
        logits[:, 2] = -9  # nobody's
        tables, gates = _route(logits, n_used, "host")
        chosen = tables[: n_tokens * n_used].reshape(n_tokens, n_used)
        width = n_values * n_used if summed else n_values
        x = RNG.normal(size=(n_tokens, width)).astype(np.float32)
        residual = RNG.normal(size=(n_tokens, n_rows)).astype(np.float32)
        slots = np.zeros((n_tokens, n_used, n_rows), np.float32)
        for e, t, j in ((e, t, j) for t, row in enumerate(chosen) for j, e in enumerate(row)):
            one = x[t : t + 1].reshape(-1, n_values)
            slots[t, j] = _outputs(fmt, rows[e], one[min(j, len(one) - 1)][None], n_rows)[0]
        wanted = slots.reshape(n_tokens, -1)
        if summed:
            wanted = residual
            for j in range(n_used):
                wanted = fma_f32(gates[:, j, None], slots[:, j], wanted)
        args = {
            "x": x if fmt not in panels.FORMATS else _quantized(x), "y": np.zeros_like(wanted),
            "experts": tables, "gates": gates, "residual": residual, "n_rows": n_rows,
            "n_values": n_values, "n_tokens": n_tokens, "n_used": n_used, "weight": rows,
        }  # fmt: skip
        for name, own, units, scratch in _forms(fmt, rows, n_rows, n_values):
            kernel = getattr(matmul_experts, name)(format=fmt, summed=summed)
            for level in ("eager", *levels()[:2]) if n_tokens == 5 else ("host",):
                got = run(kernel, level, args | own, units, ["y"], scratch)["y"]
                assert_same_bits(got, wanted, f"{name} of {n_tokens} tokens, {level}")


def _forms(
    fmt: str, rows: Array, n_rows: int, n_values: int
) -> list[tuple[str, dict[str, object], int, int]]:
    """Kernel, its own arguments, units and scratch, for each way that weights may lie."""
    if fmt not in panels.FORMATS:
        nbytes = matmul_float.scratch_nbytes(n_values)
        return [("experts_float", {"unit_rows": 8}, -(-n_rows // 8), nbytes)]
    n_panels = -(-n_rows // 16)
    packed = np.zeros((len(rows), n_panels * panels.FORMATS[fmt].panel_nbytes(n_values)), np.uint8)
    for own, expert in zip(packed, rows, strict=True):
        args = {"weight": expert, "y": own, "n_rows": n_rows, "n_values": n_values}
        own[:] = run(matmul.pack_panels(format=fmt), "host", args, n_panels, ["y"])["y"]
    return [
        ("experts_mapped", {}, n_panels, matmul_experts.mapped_scratch_nbytes(fmt, n_values)),
        ("experts_packed", {"weight": packed}, n_panels, matmul_experts.PACKED_SCRATCH_NBYTES),
    ]
