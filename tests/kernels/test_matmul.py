"""Block-quantized and float matmuls: all forms give the same bits, and they are the right ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.random_blocks import scale_fields, scale_of, set_scale
from ignis.gguf import BLOCKS
from ignis.kernels import a8, float_panels, matmul, matmul_float, panels
from ignis.kernels.eager import fma_f32
from tests.kernels.helpers import Array, assert_same_bits, levels, run, run_everywhere

WIDE = ("q4_1",)  # tried with more shapes
NARROW = tuple(name for name in panels.FORMATS if name not in WIDE)
EVERYWHERE = ("q8_0", "q4_k", "q6_k", "iq4_nl")  # tried on every feature level
FLOATS = ("f32", "f16", "bf16")
# Rows around the panel's 16, groups (blocks or super-blocks) from one, tokens around the unrolling.
SHAPES = ((16, 1, 1), (17, 2, 2), (33, 3, 12), (5, 1, 24), (40, 2, 11))
FEW_SHAPES = ((16, 1, 1), (33, 3, 1), (17, 2, 4))
LONG = (31, 32, 33)  # blocks; super-blocks are tried up to three


class Quantized:
    """Activations in A8, with the parts that the definition speaks of."""

    def __init__(self, x: NDArray[np.float32]) -> None:
        n_tokens = len(x)
        blocks = x.reshape(n_tokens, -1, 32)
        amax = np.abs(blocks).max(-1)
        self.d = amax / np.float32(127)
        self.q = np.rint(blocks * (np.float32(127) / amax)[..., None]).astype(np.int8)
        self.s = self.q.astype(np.int32).sum(-1)
        self.bytes = self._blocks()

    def _blocks(self) -> NDArray[np.uint8]:
        n_tokens, n_blocks = self.q.shape[:2]
        out = np.zeros((n_blocks, n_tokens, a8.BLOCK_NBYTES), np.uint8)
        out[..., :32] = self.q.transpose(1, 0, 2).view(np.uint8)
        for at, values in (
            (a8.D_AT, self.d),
            (a8.N_AT, (-128 * self.s).astype(np.int32)),
            (a8.DS_AT, self.d * self.s.astype(np.float32)),
            (a8.HALVES_AT, self._halves()),
        ):
            words = np.ascontiguousarray(values.T)
            out[..., at : at + 4] = words.view(np.uint8).reshape(n_blocks, n_tokens, 4)
        return out.reshape(-1)

    def _halves(self) -> NDArray[np.int32]:
        """The sums of both halves, 16 bits each."""
        q = self.q.reshape(*self.q.shape[:2], 2, 16)
        return np.ascontiguousarray(q.sum(-1, dtype=np.int16)).view(np.int32)[..., 0]


def _weights(rng: np.random.Generator, fmt: str, n_rows: int, n_groups: int) -> Array:
    """Random bytes as blocks, with scales and minimums of ordinary size."""
    blocks = rng.integers(0, 256, (n_rows, n_groups, BLOCKS[fmt].nbytes), dtype=np.uint8)
    records = blocks.view(BLOCKS[fmt].dtype)
    for name in sorted(scale_fields(BLOCKS[fmt]) - {"e"}):
        set_scale(records, name, rng.standard_normal(records.shape).astype(np.float16))
    if fmt == "mxfp4":
        records["e"] = rng.integers(118, 130, records["e"].shape)
    return blocks


# Fields that make a decoder show its integers: scales of one, no minimum, codes of one.
_ONE = {"d": 1.0, "e": 128, "m": 0.0, "dmin": 0.0}
_SCALES_OF_ONE = {
    "q4_k": {"scales": [1] * 4 + [0] * 4 + [1] * 4},
    "q5_k": {"scales": [1] * 4 + [0] * 4 + [1] * 4},
    "iq4_xs": {"scales_l": 0x11, "scales_h": 0xAAAA},
}
_CODES_OF_ONE = {
    "q4_k": {"qs": 0x11}, "q5_k": {"qs": 0x11, "qh": 0}, "iq4_xs": {"qs": 0x88},
    "mxfp4": {"qs": 0x11},
}  # fmt: skip


def _probe(fmt: str, weights: Array, fields: Mapping[str, Any]) -> NDArray[np.float32]:
    """Decode with some fields replaced: [rows, blocks of 32, 32]."""
    records = weights.copy().view(BLOCKS[fmt].dtype)
    for name in set(fields) & set(records.dtype.names or ()):
        records[name] = fields[name]
    decoded = BLOCKS[fmt].decode(records.view(np.uint8).reshape(len(weights), -1))
    return decoded.reshape(len(weights), -1, 32)


# The IQ formats: what d is divided by, and the bits of the scales for 32 values.
_DIVISORS = {"iq1_s": 8, "iq1_m": 8, "iq2_xxs": 8, "iq2_xs": 8, "iq2_s": 8, "iq3_xxs": 4,
             "iq3_s": 1}  # fmt: skip


def _without_scales(fmt: str, weights: Array) -> Array:
    """IQ blocks with scales of one where they are for 32 values."""
    records = weights.copy().view(BLOCKS[fmt].dtype)
    if fmt == "iq2_xxs":
        records["qs"]["word"] &= 0x0FFFFFFF
    elif fmt == "iq3_xxs":
        records["words"] &= 0x0FFFFFFF
    elif fmt == "iq3_s":
        records["scales"] = 0
    elif fmt == "iq1_s":
        records["qh"] &= 0x8FFF
    return records.view(np.uint8)


def _grid_parts(fmt: str, weights: Array) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """IQ blocks as integers [rows, blocks, 32] and the f32 scales of the blocks of 32."""

    def integers(blocks: Array) -> NDArray[np.float32]:
        records = blocks.copy().view(BLOCKS[fmt].dtype)
        set_scale(records, "d", _DIVISORS[fmt])
        decoded = BLOCKS[fmt].decode(records.view(np.uint8).reshape(len(weights), -1))
        return decoded.reshape(len(weights), -1, 32)

    unscaled, scaled = integers(_without_scales(fmt, weights)), integers(weights)
    records = weights.view(BLOCKS[fmt].dtype)[..., 0]
    d = scale_of(records, "d").astype(np.float32).repeat(8, axis=1)
    odd = (scaled / unscaled)[..., 0]  # 1 where scales belong to 16 values
    return unscaled.astype(np.int64), d * (odd / np.float32(_DIVISORS[fmt]))


def _reference(fmt: str, weights: Array, x: Quantized) -> NDArray[np.float32]:
    """NUMERICS 2 in plain scalar order: blocks ascending, one accumulator an output.

    Q4_K and Q5_K add their minimum as Q4_1 does (decision 13). The integers come from the decoder,
    which `tests/gguf` compares with another's.
    """
    if fmt in _DIVISORS:
        integers, dw = _grid_parts(fmt, weights)
    else:
        integers = _probe(fmt, weights, {**_ONE, **_SCALES_OF_ONE.get(fmt, {})}).astype(np.int64)
    records = weights.view(BLOCKS[fmt].dtype)[..., 0]
    n_blocks = integers.shape[1]
    wide = {name: np.repeat(records[name].astype(np.float32), n_blocks // records.shape[1], axis=1)
            for name in ("d", "m", "dmin") if name in (records.dtype.names or ())}  # fmt: skip
    if fmt in _CODES_OF_ONE:
        fields = {**_ONE, **_CODES_OF_ONE[fmt]}
        unit = {"e": records["e"]} if fmt == "mxfp4" else {}
        sc = _probe(fmt, weights, fields | {name: v[..., None] for name, v in unit.items()})
        dw = sc[:, :, 0] * wide.get("d", np.float32(1))
    elif fmt not in _DIVISORS:
        dw = wide["d"]
    minimums = None
    if "dmin" in wide:  # the integers that dmin multiplies
        minimums = _probe(fmt, weights, {"d": 0.0, "dmin": -1.0}).astype(np.int64)
    if fmt in ("q4_k", "q5_k") and minimums is not None:  # one minimum a block: exact in f32
        wide["m"] = -wide["dmin"] * minimums[:, :, 0].astype(np.float32)
        minimums = None
    acc = np.zeros((len(x.q), len(weights)), np.float32)
    for b in range(n_blocks):
        q = x.q[:, b].astype(np.int64)
        isum = (q @ integers[:, b].T).astype(np.float32)
        acc = fma_f32(isum, dw[None, :, b] * x.d[:, b, None], acc)
        if "m" in wide:
            ds = x.d[:, b] * x.s[:, b].astype(np.float32)
            acc = fma_f32(wide["m"][None, :, b], ds[:, None], acc)
        if minimums is not None:
            msum = (q @ minimums[:, b].T).astype(np.float32)
            acc = fma_f32(msum, -(wide["dmin"][None, :, b] * x.d[:, b, None]), acc)
    return acc


def _case(
    fmt: str, shape: tuple[int, int, int], poison: Sequence[float] = ()
) -> tuple[dict[str, Any], Quantized, Array]:
    """Arguments for `shape` (rows, groups, tokens); `poison` goes into some scales."""
    n_rows, n_groups, n_tokens = shape
    n_values = n_groups * BLOCKS[fmt].block_size
    rng = np.random.default_rng(n_rows * 1000 + n_tokens)
    x = Quantized(rng.standard_normal((n_tokens, n_values)).astype(np.float32))
    weights = _weights(rng, fmt, n_rows, n_groups)
    records = weights.view(BLOCKS[fmt].dtype)
    for name in scale_fields(BLOCKS[fmt]) - {"e"} if poison else ():
        scales = scale_of(records, name)
        scales.reshape(-1)[: len(poison)] = rng.permutation(poison)
        set_scale(records, name, scales)
    args = {
        "weight": weights, "x": x.bytes, "y": np.zeros((n_tokens, n_rows), np.float32),
        "bias": rng.standard_normal(n_rows).astype(np.float32),
        "residual": rng.standard_normal((n_tokens, n_rows)).astype(np.float32),
        "n_rows": n_rows, "n_values": n_values, "n_tokens": len(x.q),
    }  # fmt: skip
    return args, x, weights


def _check(
    fmt: str, case: tuple[dict[str, Any], Quantized, Array], places: Sequence[str]
) -> None:  # fmt: skip
    """Mapped, packed and by rows, on every one of `places`: the reference's bits."""
    args, x, weights = case
    with np.errstate(all="ignore"):
        wanted = (_reference(fmt, weights, x) + args["bias"]) + args["residual"]
    n_panels, n_values = -(-args["n_rows"] // 16), args["n_values"]
    scratch = matmul.scratch_nbytes(fmt, n_values)
    packing = {**args, "y": np.zeros(n_panels * panels.FORMATS[fmt].panel_nbytes(n_values),
                                     np.uint8)}  # fmt: skip
    families = [matmul.matmul_mapped] + [matmul.matmul_rows] * (len(x.q) == 1)
    for place in places:
        for family in families:
            got = run(family(format=fmt), place, args, n_panels, ["y"], scratch)["y"]
            assert_same_bits(got, wanted, f"{family.name} {fmt} {wanted.shape} on {place}")
        if place in ("eager", "host"):  # elsewhere these are parts of matmul_mapped
            packed = run(matmul.pack_panels(format=fmt), place, packing, n_panels, ["y"])["y"]
            got = run(matmul.matmul_packed(format=fmt), place, {**args, "weight": packed}, n_panels,
                      ["y"], matmul.SUMS_NBYTES)["y"]  # fmt: skip
            assert_same_bits(got, wanted, f"packed {fmt} {wanted.shape} on {place}")


_ENDS = ("eager", *levels()[:2])  # the host, and the lowest level below it
_POISON = (np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-24, 65504.0, 1.0)


@pytest.mark.parametrize("fmt", WIDE)
def test_quantized_matmuls_agree_in_every_form(fmt: str) -> None:
    """Mapped, packed, eager, the host and the lowest level: one definition, the same bits."""
    for shape in SHAPES:
        _check(fmt, _case(fmt, shape), _ENDS)
    _check_hostile_scales(fmt, _ENDS)


@pytest.mark.parametrize("fmt", NARROW)
def test_every_format_agrees_in_every_form(fmt: str) -> None:
    """The same for all others, with fewer shapes."""
    places = ("eager", *levels()) if fmt in EVERYWHERE else _ENDS
    for shape in FEW_SHAPES:
        _check(fmt, _case(fmt, shape), places)
        if panels.FORMATS[fmt].looks_up:
            places = levels()[:2]  # point by point, the eager twin takes its time
    _check_hostile_scales(fmt, places)
    for n_blocks in LONG if BLOCKS[fmt].block_size == 32 else ():
        _check(fmt, _case(fmt, (16, n_blocks, 1)), ["host"])


@pytest.mark.parametrize("fmt", ["q4_0", "q6_k"])
def test_tokens_beyond_one_pass(fmt: str) -> None:
    """Two full passes, and a last one that is no whole number of tiles."""
    _check(fmt, _case(fmt, (33, 2, 2 * matmul.PASS_TOKENS + 7)), ["host"])


def _check_hostile_scales(fmt: str, places: Sequence[str]) -> None:
    """A NaN or infinite scale in the file shows as such, and zero blocks give zero."""
    _check(fmt, _case(fmt, (16, 2, 1), _POISON), places)
    args, x, weights = _case(fmt, (20, 2, 4))
    weights[::2] = 0
    _check(fmt, (args, x, weights), ["host"])


@pytest.mark.parametrize("code", [0x00, 0xFF])
def test_the_largest_sums_of_q6_k(code: int) -> None:
    """Sums of halves times scales are exact up to the last of 24 bits, in floats too."""
    args, x, weights = _case("q6_k", (16, 1, 5))
    records = weights.view(BLOCKS["q6_k"].dtype)
    records["ql"], records["qh"], records["scales"] = code, code, -128
    numbers = np.where(np.arange(256) % 32 < 31, 1.0, 0.5) * np.array([[1], [-1], [1], [-1], [1]])
    x = Quantized(numbers.astype(np.float32))
    _check("q6_k", (args | {"x": x.bytes}, x, weights), _ENDS)


def test_every_scale_of_mxfp4() -> None:
    """From the subnormal 2^-128 to 2^127, whose products reach infinity."""
    args, x, weights = _case("mxfp4", (256, 1, 1))
    weights[:, 0, 0] = np.arange(256)
    _check("mxfp4", (args, x, weights), _ENDS[1:])


def test_scales_stay_compact_in_panels() -> None:
    """At most 0.2 bit a weight more than the file; TQ1_0's digits become pairs of bits.

    Of the IQ formats the codes are unpacked, but not the scales.
    """
    for name, fmt in panels.FORMATS.items():
        in_file = BLOCKS[name].nbytes * 16
        extra = (fmt.panel_group_nbytes - in_file) * 8 / (16 * BLOCKS[name].block_size)
        if fmt.looks_up:
            extra -= fmt.bits - BLOCKS[name].nbytes * 8 / BLOCKS[name].block_size
            assert extra <= 0.3125, name
            continue
        assert extra <= (0.4 if name == "tq1_0" else 0.2), name


@pytest.mark.parametrize("fmt", WIDE)
def test_residual_may_be_the_output(fmt: str) -> None:
    """The residual stream is updated in place; a partial panel must not add twice."""
    args, x, weights = _case(fmt, (21, 1, 3))
    both = args["residual"].copy()
    wanted = (_reference(fmt, weights, x) + args["bias"]) + both
    args |= {"residual": both, "y": both}
    scratch = matmul.scratch_nbytes(fmt, args["n_values"])
    got = run(matmul.matmul_mapped(format=fmt), "host", args, 2, ["y"], scratch)["y"]
    assert_same_bits(got, wanted, fmt)


@pytest.mark.parametrize("fmt", FLOATS)
def test_float_matmul_is_the_defined_order(fmt: str) -> None:
    """16 accumulators by k mod 16, fma ascending, then the tree; a tail counts as zeros.

    The last two have more rows than stay in a cache, and more values than a pass takes.
    """
    shapes = ((4, 16, 1), (7, 40, 5), (33, 72, 13), (3, 5, 2), (1, 17, 6), (67, 24, 7),
              (5, 1301, 8))  # fmt: skip
    for shape in shapes:
        args, wanted = _float_case(fmt, shape, unit_rows=8)
        got = run_everywhere(matmul_float.matmul_float(format=fmt), args, -(-shape[0] // 8),
                             scratch_nbytes=matmul_float.scratch_nbytes(shape[1]))  # fmt: skip
        assert_same_bits(got, wanted, f"{fmt} {shape}")


@pytest.mark.parametrize("fmt", FLOATS)
def test_panels_of_floats_are_the_defined_order(fmt: str) -> None:
    """Many tokens meet rows transposed, in another tile for each number that is left of them.

    Some rows do not fill a panel; values of the last shape take three passes.
    """
    fewest = float_panels.FEWEST_TOKENS[fmt]
    shapes = [(69, 48, fewest + i) for i in range(6)] + [(33, 1296, fewest)]
    kernel = matmul_float.matmul_float(format=fmt)
    for shape in shapes:
        args, wanted = _float_case(fmt, shape, unit_rows=64)
        scratch = matmul_float.scratch_nbytes(shape[1])
        for level in levels() if shape != shapes[1] else ("eager", *levels()):
            got = run(kernel, level, args, -(-shape[0] // 64), ["y"], scratch)["y"]
            assert_same_bits(got, wanted, f"{fmt} {shape} on {level}")


def _float_case(
    fmt: str, shape: tuple[int, int, int], unit_rows: int
) -> tuple[dict[str, object], NDArray[np.float32]]:
    """Arguments of `matmul_float` for so many rows, values and tokens, and its outputs."""
    n_rows, n_values, n_tokens = shape
    rng = np.random.default_rng(n_rows)
    weights = rng.standard_normal((n_rows, n_values)).astype(np.float32)
    stored = BLOCKS[fmt].encode(weights)
    x = rng.standard_normal((n_tokens + 1, n_values)).astype(np.float32)
    rows = np.roll(np.arange(n_tokens + 1), 1)[:n_tokens].astype(np.int32)
    bias = rng.standard_normal(n_rows).astype(np.float32)
    residual = rng.standard_normal((n_tokens, n_rows)).astype(np.float32)
    args = {
        "weight": np.ascontiguousarray(stored), "x": x, "rows": rows, "n_rows": n_rows,
        "y": np.zeros((n_tokens, n_rows), np.float32), "n_values": n_values, "bias": bias,
        "n_tokens": n_tokens, "residual": residual, "unit_rows": unit_rows,
    }  # fmt: skip
    decoded = BLOCKS[fmt].decode(stored).reshape(n_rows, n_values)
    return args, (_float_reference(x[rows], decoded) + bias) + residual


def _float_reference(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
    padded = -(-x.shape[1] // 16) * 16
    x, w = (np.pad(a, ((0, 0), (0, padded - a.shape[1]))) for a in (x, w))
    acc = np.zeros((len(x), len(w), 16), np.float32)
    for k in range(0, padded, 16):
        acc = fma_f32(x[:, None, k : k + 16], w[None, :, k : k + 16], acc)
    for half in (8, 4, 2, 1):
        acc = acc[..., :half] + acc[..., half : 2 * half]
    return acc[..., 0]


def test_levels_below_the_host_are_tried() -> None:
    """On any x86 machine of the last ten years at least one lower level must run."""
    assert levels()[0] == "host"
