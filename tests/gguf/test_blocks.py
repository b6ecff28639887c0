"""If these fail, weights would mean something else to Ignis than to the rest of the world.

The oracle is the `gguf` package, which shares no code with ours.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from bench.random_blocks import set_scale
from ignis.errors import UnsupportedModelError, UsageError
from ignis.gguf import BLOCKS, BlockFormat
from ignis.gguf.blocks import BLOCKS_BY_TYPE, REMOVED_TYPES
from tests.gguf.ggml_encoder import SEARCHED

QUANTIZED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4", "tq1_0", "tq2_0")
ENCODABLE = ("f32", "f16", "bf16", *QUANTIZED)     # with a result that the oracle defines
IQ = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
SUPPORTED = (*ENCODABLE, "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", *IQ)


def oracle_type(block: BlockFormat) -> GGMLQuantizationType:
    return GGMLQuantizationType(block.ggml_type)


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    """Every bit equal; a NaN need only be a NaN, as its payload depends on the processor."""
    assert got.dtype == wanted.dtype == np.float32 and got.shape == wanted.shape
    got, wanted = (np.where(np.isnan(a), np.float32(np.nan), a) for a in (got, wanted))
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def test_the_table_has_every_type_of_ggml_at_its_size() -> None:
    for kind, sizes in GGML_QUANT_SIZES.items():
        block = BLOCKS_BY_TYPE[kind]
        assert block.name == kind.name.lower()
        if block.name != "q8_1":    # never stored; the oracle still has its old, longer layout
            assert (block.block_size, block.nbytes) == sizes, block
    assert not set(REMOVED_TYPES) & set(BLOCKS_BY_TYPE)
    assert all(BLOCKS[name].name == name for name in BLOCKS)
    assert {name for name, block in BLOCKS.items() if block.supported} == set(SUPPORTED)
    assert {name for name, block in BLOCKS.items() if block.encodable} == {
        *ENCODABLE, *SEARCHED}


@pytest.mark.parametrize("name", SUPPORTED)
def test_decode_equals_the_oracle_on_random_bytes(name: str) -> None:
    """Random bytes hold every kind of scale: NaN, infinities, subnormals, both zeros."""
    block = BLOCKS[name]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (37, 64 * block.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = dequantize(raw, oracle_type(block))
    assert_same_bits(block.decode(raw), wanted)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00,
                                   0x7C01, 0xFE00])
def test_decode_of_special_numbers_is_silent_and_right(name: str, scale: int) -> None:
    block = BLOCKS[name]
    raw = np.random.default_rng(2).integers(0, 256, (4, 3 * block.nbytes), dtype=np.uint8)
    records = raw.view(block.dtype)
    if name == "iq1_m":  # whose d is no field of its own
        set_scale(records, "d", np.array(scale, np.uint16).view(np.float16))
    for field in {"x", "d", "m", "dmin"} & set(records.dtype.names or ()):
        pattern = f"u{records.dtype[field].itemsize}"
        shift = 16 if pattern == "u4" else 0
        records[field] = np.array(scale << shift, pattern).view(records.dtype[field])
    with np.errstate(all="ignore"):
        wanted = dequantize(raw, oracle_type(block))
    with np.errstate(all="raise"):
        assert_same_bits(block.decode(raw), wanted)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_all_65536_halves(name: str) -> None:
    block = BLOCKS[name]
    raw = np.arange(65536, dtype="<u2").view(np.uint8)
    with np.errstate(all="ignore"):
        wanted = dequantize(raw[None], oracle_type(block))[0]
    values = block.decode(raw)
    assert_same_bits(values, wanted)
    back = block.encode(values).view("<u2")
    same = ~np.isnan(values)
    np.testing.assert_array_equal(back[same], np.arange(65536)[same])
    assert np.isnan(block.decode(back.view(np.uint8))[~same]).all()


def test_every_power_of_two_of_mxfp4() -> None:
    """Subnormal scales and the largest one, whose codes reach infinity."""
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 16 + np.arange(15, -1, -1)
    with np.errstate(all="ignore"):
        wanted = dequantize(raw, GGMLQuantizationType.MXFP4)
    decoded = BLOCKS["mxfp4"].decode(raw)
    assert_same_bits(decoded, wanted)
    assert np.isinf(decoded[255]).any() and (decoded[0][decoded[0] > 0] < 2.0**-126).any()


@pytest.mark.parametrize("name", ENCODABLE)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_encode_equals_the_oracle(name: str, spread: float) -> None:
    block = BLOCKS[name]
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((65, 1280)) * spread).astype(np.float32)
    values[3] = 0
    values[4] = -1.5
    values[5, ::7] = 0
    values[6] = np.round(values[6])                       # many exact halves after scaling
    values[7] = np.linspace(-127, 127, 1280).round(0) / 2
    wanted = quantize(values, oracle_type(block)).view(np.uint8)
    np.testing.assert_array_equal(block.encode(values), wanted)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_encode_of_arbitrary_bits_equals_the_oracle(name: str) -> None:
    """Signalling and quiet NaNs, infinities, overflow, subnormals, halfway cases."""
    block = BLOCKS[name]
    bits = np.random.default_rng(4).integers(0, 1 << 32, (64, 512), dtype=np.uint32)
    bits[0, :10] = [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x7FFFFFFF,
                    0x00008000, 0x00018000, 0x3F808000, 0x3F818000]
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        wanted = quantize(values, oracle_type(block)).view(np.uint8)
    np.testing.assert_array_equal(block.encode(values), wanted)


@pytest.mark.parametrize("name", (*QUANTIZED, *SEARCHED))
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_block_with_no_finite_maximum_does_not_decode_to_numbers(name: str, poison: float
                                                                   ) -> None:
    """A NaN must not be rounded to an innocent weight."""
    size = BLOCKS[name].block_size
    values = np.ones((2, 2 * size), np.float32)
    values[0, 5] = poison
    with np.errstate(all="raise"):
        decoded = BLOCKS[name].decode(BLOCKS[name].encode(values))
    assert not np.isfinite(decoded[0, :size]).any()
    assert np.isfinite(decoded[0, size:]).all() and np.isfinite(decoded[1]).all()


@pytest.mark.parametrize("name", SUPPORTED)
def test_shapes_and_strides(name: str) -> None:
    """Leading axes stay; a strided view is decoded like its copy; chunks join without a seam."""
    block = BLOCKS[name]
    raw = np.random.default_rng(5).integers(0, 64, (3, 2, 4 * block.nbytes), dtype=np.uint8)
    assert block.decode(raw).shape == (3, 2, 4 * block.block_size)
    assert_same_bits(block.decode(raw[::2]), block.decode(raw[::2].copy()))
    assert block.decode(raw[:, :, :0]).shape == (3, 2, 0)
    long = np.tile(raw.reshape(-1), (1 << 19) // (24 * block.block_size) + 1)
    once = block.decode(raw.reshape(-1))
    assert_same_bits(block.decode(long), np.tile(once, len(long) // raw.size))


def test_refusals() -> None:
    with pytest.raises(UsageError, match="row length for format q4_1: got 33, wanted a multiple"):
        BLOCKS["q4_1"].row_nbytes(33)
    with pytest.raises(UsageError, match="q8_0"):
        BLOCKS["q8_0"].encode(np.zeros((2, 31), np.float32))
    assert BLOCKS["q4_k"].row_nbytes(512) == 288
    with pytest.raises(UnsupportedModelError, match="nvfp4"):
        BLOCKS["nvfp4"].decode(np.zeros(36, np.uint8))
    with pytest.raises(UsageError, match="no encoder for weight format iq1_s"):
        BLOCKS["iq1_s"].encode(np.zeros(256, np.float32))
