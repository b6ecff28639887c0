"""Block-quantized and float matmuls: all forms give the same bits, and they are the right ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ignis.gguf import BLOCKS
from ignis.kernels import a8, matmul, matmul_float, panels
from ignis.kernels.eager import fma_f32
from tests.kernels.helpers import Array, assert_same_bits, levels, run, run_everywhere

FORMATS = tuple(panels.FORMATS)
FLOATS = ("f32", "f16", "bf16")
# Rows around the panel's 16, blocks from one, tokens through every tile width.
SHAPES = ((16, 32, 1), (17, 64, 2), (33, 96, 12), (5, 32, 24), (40, 64, 11))


class Quantized:
    """Activations in A8, with the parts that the definition speaks of."""

    def __init__(self, x: NDArray[np.float32]) -> None:
        n_tokens, n_values = x.shape
        blocks = x.reshape(n_tokens, -1, 32)
        amax = np.abs(blocks).max(-1)
        self.d = amax / np.float32(127)
        self.q = np.rint(blocks * (np.float32(127) / amax)[..., None]).astype(np.int8)
        self.s = self.q.astype(np.int32).sum(-1)
        self.tiles = _tiles(n_tokens)
        self.bytes = np.concatenate([self._tile(*tile) for tile in self.tiles.tolist()])

    def _tile(self, first: int, width: int) -> NDArray[np.uint8]:
        here = slice(first, first + width)
        n_blocks = self.q.shape[1]
        out = np.zeros((n_blocks, width, a8.BLOCK_NBYTES), np.uint8)
        out[..., :32] = self.q[here].transpose(1, 0, 2).view(np.uint8)
        for at, values in (
            (a8.D_AT, self.d[here]),
            (a8.N_AT, (-128 * self.s[here]).astype(np.int32)),
            (a8.DS_AT, self.d[here] * self.s[here].astype(np.float32)),
        ):
            words = np.ascontiguousarray(values.T)
            out[..., at : at + 4] = words.view(np.uint8).reshape(n_blocks, width, 4)
        return out.reshape(-1)


def _tiles(n_tokens: int) -> NDArray[np.int32]:
    widths = list(a8.tile_widths(n_tokens))
    starts = np.cumsum([0, *widths[:-1]])
    return np.stack([starts, widths], axis=1).astype(np.int32)


def _weights(rng: np.random.Generator, fmt: str, n_rows: int, n_values: int) -> Array:
    """Random bytes as blocks, with scales and minimums of ordinary size."""
    blocks = rng.integers(0, 256, (n_rows, n_values // 32, BLOCKS[fmt].nbytes), dtype=np.uint8)
    records = blocks.view(BLOCKS[fmt].dtype)
    names = [name for name in ("d", "m") if name in (records.dtype.names or ())]
    for name in names:
        records[name] = rng.standard_normal(records[name].shape).astype(np.float16)
    return blocks


def _reference(fmt: str, weights: Array, x: Quantized) -> NDArray[np.float32]:
    """NUMERICS 2 in plain scalar order: blocks ascending, one accumulator an output."""
    spec = panels.FORMATS[fmt]
    raw = weights[..., spec.quants_at :]
    if spec.bits == 4:
        raw = np.concatenate([raw & 15, raw >> 4], axis=-1)
    integers = (raw ^ spec.flip).astype(np.int64) - spec.offset
    halves = weights[..., : spec.quants_at].copy().view(np.float16).astype(np.float32)
    acc = np.zeros((len(x.q), len(weights)), np.float32)
    for b in range(weights.shape[1]):
        isum = (x.q[:, b].astype(np.int64) @ integers[:, b].T).astype(np.float32)
        acc = fma_f32(isum, halves[None, :, b, 0] * x.d[:, b, None], acc)
        if spec.has_min:
            ds = x.d[:, b] * x.s[:, b].astype(np.float32)
            acc = fma_f32(halves[None, :, b, 1], ds[:, None], acc)
    return acc


def _case(fmt: str, shape: tuple[int, int, int]) -> tuple[dict[str, Any], Quantized, Array]:
    n_rows, n_values, n_tokens = shape
    rng = np.random.default_rng(n_rows * 1000 + n_tokens)
    x = Quantized(rng.standard_normal((n_tokens, n_values)).astype(np.float32))
    weights = _weights(rng, fmt, n_rows, n_values)
    args = {
        "weight": weights, "x": x.bytes, "y": np.zeros((n_tokens, n_rows), np.float32),
        "bias": rng.standard_normal(n_rows).astype(np.float32),
        "residual": rng.standard_normal((n_tokens, n_rows)).astype(np.float32),
        "n_rows": n_rows, "n_values": n_values, "tiles": x.tiles, "n_tiles": len(x.tiles),
    }  # fmt: skip
    return args, x, weights


def _panels(fmt: str, args: Mapping[str, Any]) -> Array:
    n_panels = -(-args["n_rows"] // 16)
    nbytes = n_panels * panels.FORMATS[fmt].panel_nbytes(args["n_values"])
    packing = {**args, "y": np.zeros(nbytes, np.uint8)}
    return run_everywhere(matmul.pack_panels(format=fmt), packing, n_panels)


@pytest.mark.parametrize("fmt", FORMATS)
def test_quantized_matmuls_agree_in_every_form(fmt: str) -> None:
    """Mapped, packed, eager, and all feature levels: one definition, the same bits."""
    for shape in SHAPES:
        args, x, weights = _case(fmt, shape)
        wanted = (_reference(fmt, weights, x) + args["bias"]) + args["residual"]
        n_panels, scratch = -(-shape[0] // 16), matmul.scratch_nbytes(fmt, shape[1])
        mapped = run_everywhere(matmul.matmul_mapped(format=fmt), args, n_panels,
                                scratch_nbytes=scratch)  # fmt: skip
        assert_same_bits(mapped, wanted, f"{fmt} {shape}")
        packed = {**args, "weight": _panels(fmt, args)}
        got = run(matmul.matmul_packed(format=fmt), "host", packed, n_panels, ["y"], 64)["y"]
        assert_same_bits(got, wanted, f"packed {fmt} {shape}")
        if shape[2] == 1:
            rows = run_everywhere(matmul.matmul_rows(format=fmt), args, n_panels,
                                  scratch_nbytes=64)  # fmt: skip
            assert_same_bits(rows, wanted, f"rows {fmt} {shape}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_residual_may_be_the_output(fmt: str) -> None:
    """The residual stream is updated in place; a partial panel must not add twice."""
    args, x, weights = _case(fmt, (21, 32, 3))
    both = args["residual"].copy()
    wanted = (_reference(fmt, weights, x) + args["bias"]) + both
    args |= {"residual": both, "y": both}
    scratch = matmul.scratch_nbytes(fmt, 32)
    got = run(matmul.matmul_mapped(format=fmt), "host", args, 2, ["y"], scratch)["y"]
    assert_same_bits(got, wanted, fmt)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0, 2.0**-24])
def test_hostile_scales_reach_the_output(scale: float) -> None:
    """A NaN or infinite scale in the file shows as such, and zero blocks give zero."""
    args, x, weights = _case("q8_0", (16, 64, 2))
    weights.view(BLOCKS["q8_0"].dtype)["d"] = np.float16(scale)
    with np.errstate(all="ignore"):
        wanted = (_reference("q8_0", weights, x) + args["bias"]) + args["residual"]
    scratch = matmul.scratch_nbytes("q8_0", 64)
    got = run(matmul.matmul_mapped(format="q8_0"), "host", args, 1, ["y"], scratch)["y"]
    assert_same_bits(got, wanted, str(scale))


@pytest.mark.parametrize("fmt", FLOATS)
def test_float_matmul_is_the_defined_order(fmt: str) -> None:
    """16 accumulators by k mod 16, fma ascending, then the tree; a tail counts as zeros."""
    for n_rows, n_values, n_tokens in ((4, 16, 1), (7, 40, 5), (33, 72, 13), (3, 5, 2), (1, 17, 6)):
        rng = np.random.default_rng(n_rows)
        weights = rng.standard_normal((n_rows, n_values)).astype(np.float32)
        stored = BLOCKS[fmt].encode(weights)
        x = rng.standard_normal((n_tokens + 1, n_values)).astype(np.float32)
        rows = np.roll(np.arange(n_tokens + 1), 1)[:n_tokens].astype(np.int32)
        args = {
            "weight": np.ascontiguousarray(stored), "x": x, "rows": rows, "n_rows": n_rows,
            "y": np.zeros((n_tokens, n_rows), np.float32), "n_values": n_values,
            "bias": rng.standard_normal(n_rows).astype(np.float32), "n_tokens": n_tokens,
            "residual": rng.standard_normal((n_tokens, n_rows)).astype(np.float32),
            "unit_rows": 8,
        }  # fmt: skip
        got = run_everywhere(matmul_float.matmul_float(format=fmt), args, -(-n_rows // 8),
                             scratch_nbytes=64)  # fmt: skip
        decoded = BLOCKS[fmt].decode(stored).reshape(n_rows, n_values)
        wanted = (_float_reference(x[rows], decoded) + args["bias"]) + args["residual"]
        assert_same_bits(got, wanted, f"{fmt} {n_rows}x{n_values} {n_tokens}")


def _float_reference(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
    padded = -(-x.shape[1] // 16) * 16
    x, w = (np.pad(a, ((0, 0), (0, padded - a.shape[1]))) for a in (x, w))
    acc = np.zeros((len(x), len(w), 16), np.float32)
    for k in range(0, padded, 16):
        acc = fma_f32(x[:, None, k : k + 16], w[None, :, k : k + 16], acc)
    for half in (8, 4, 2, 1):
        acc = acc[..., :half] + acc[..., half : 2 * half]
    return acc[..., 0]


def test_tiles_cover_every_batch_with_known_widths() -> None:
    """A batch that grows by one token must never fall out of the tile kernels."""
    for n_tokens in range(1, 600):
        widths = list(a8.tile_widths(n_tokens))
        assert sum(widths) == n_tokens
        assert set(widths) <= set(a8.TILE_WIDTHS)


def test_levels_below_the_host_are_tried() -> None:
    """On any x86 machine of the last ten years at least one lower level must run."""
    assert levels()[0] == "host"
