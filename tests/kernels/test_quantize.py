"""A8 activations: every quantized matmul of the model reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ignis.kernels import a8
from ignis.kernels.quantize import quantize
from tests.kernels.helpers import assert_same_bits, hostile_floats, levels, run

BLOCK = np.dtype([("q", "i1", 32), ("d", "f4"), ("n", "i4"), ("ds", "f4"), ("s", "i2", 2)])


def _in_token_order(blocks: Any, n_tokens: int) -> Any:
    """[block][token] as they lie -> blocks [T][n_blocks]."""
    return np.ascontiguousarray(blocks.reshape(-1, n_tokens).T)


def _plain(x: Any) -> Any:
    """NUMERICS 1 in plain code, one block at a time."""
    blocks = np.zeros((len(x), x.shape[1] // 32), BLOCK)
    for where in np.ndindex(blocks.shape):
        values = x[where[0], 32 * where[1] : 32 * where[1] + 32]
        amax = np.abs(values).max()
        d, q = np.float32(0), np.zeros(32, np.int64)
        if not np.isfinite(amax):
            d = np.float32(np.nan)
        elif amax >= 2.0**-100:
            d = amax / np.float32(127)
            inverse = np.float32(127) / amax
            q = np.array([round(float(v * inverse)) for v in values])
        s = int(q.sum())
        with np.errstate(over="ignore"):  # of d * s, where the values are the largest floats
            scaled = d * np.float32(s)
        blocks[where] = (q, d, -128 * s, scaled, (q[:16].sum(), q[16:].sum()))
    return blocks


def _check(x: Any, twin: bool = True) -> Any:
    n_tokens, n = x.shape
    rows = np.random.default_rng(n).permutation(n_tokens).astype(np.int32)
    args = {"x": x, "y": np.zeros(a8.nbytes(n_tokens, n), np.uint8), "rows": rows,
            "n": n, "n_rows": n_tokens}  # fmt: skip
    wanted = _plain(x)
    for level in (*(["eager"] if twin else []), *levels()):
        raw = run(quantize(), level, args, n_tokens, ["y"])["y"].view(BLOCK)
        blocks = _in_token_order(raw, n_tokens)
        assert_same_bits(blocks, wanted[rows], f"quantize on {level}")
    return wanted


def test_block_has_no_padding() -> None:
    assert BLOCK.itemsize == a8.BLOCK_NBYTES
    offsets = [BLOCK.fields[name][1] for name in ("d", "n", "ds", "s")]  # type: ignore[index]
    assert offsets == [a8.D_AT, a8.N_AT, a8.DS_AT, a8.HALVES_AT]


@pytest.mark.parametrize(("n_tokens", "n"), [(1, 32), (2, 64), (5, 96), (13, 32), (31, 64)])
def test_equals_plain_code(n_tokens: int, n: int) -> None:
    """Also that each token of each tile width lands where the matmul looks for it."""
    x = np.random.default_rng(n_tokens).standard_normal((n_tokens, n)).astype(np.float32)
    blocks = _check(x)
    decoded = blocks["q"].astype(np.float64) * blocks["d"][..., None]
    largest = np.abs(x).reshape(n_tokens, -1, 32).max(axis=2, keepdims=True)
    assert (abs(decoded.reshape(x.shape) - x).reshape(n_tokens, -1, 32)
            <= largest / 127 * (0.5 + 1e-5)).all()  # fmt: skip


def test_ties_and_extremes() -> None:
    """Ties go to even; the largest value gets 127 exactly; tiny and huge blocks stay finite."""
    x = np.zeros((1, 7 * 32), np.float32)
    blocks = x.reshape(7, 32)
    blocks[0, :5] = [127, 0.5, 1.5, 2.5, -2.5]
    blocks[1, :2] = [2.0**-100, -(2.0**-101)]
    blocks[2, :2] = [np.nextafter(np.float32(2.0**-100), np.float32(0)), 2.0**-140]
    blocks[3] = np.finfo(np.float32).max
    blocks[4] = -np.finfo(np.float32).max
    blocks[5] = -0.0
    blocks[6] = -1
    got = _check(x)[0]
    assert got["q"][0, :5].tolist() == [127, 0, 2, 2, -2]
    assert got["q"][1, :2].tolist() == [127, -64]
    assert not got["q"][2].any() and got["d"][2] == 0
    assert got["n"][3] == -128 * 32 * 127 and got["s"][4].tolist() == [-16 * 127] * 2


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lane", [0, 15, 16, 31])
def test_nan_and_infinity_poison_their_block_only(bad: float, lane: int) -> None:
    """A max that drops NaN would hide a broken layer behind sane-looking logits."""
    x = np.random.default_rng(0).standard_normal((1, 96)).astype(np.float32)
    x[0, 32 + lane] = bad
    got = _check(x)[0]
    assert np.isnan(got["d"]).tolist() == [False, True, False]
    assert np.isnan(got["ds"]).tolist() == [False, True, False]
    assert not got["q"][1].any()


def test_any_bits() -> None:
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        _check(hostile_floats(rng, 4 * 256).reshape(4, 256))
        scales = np.exp2(rng.integers(-110, 120, (64, 8, 1))).astype(np.float32)
        x = rng.standard_normal((64, 8, 32)).astype(np.float32) * scales
        _check(x.reshape(64, 256), twin=False)
