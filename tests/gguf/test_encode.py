"""If these fail, `ignis quantize` would lose more than it must, or its files would depend on luck.

The encoders here search for scales. ggml's own are the measure (`ggml_encoder`), the `gguf`
package says what the bytes mean.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from ignis.gguf import BLOCKS
from tests.gguf.ggml_encoder import GOLDEN, SEARCHED, cases, digest, errors, ggml_encode

CODES = {
    "q2_k": {"qs": (2, 0)}, "q3_k": {"qs": (2, 0), "hmask": (1, 2)}, "q4_k": {"qs": (4, 0)},
    "q5_k": {"qs": (4, 0), "qh": (1, 4)}, "q6_k": {"ql": (4, 0), "qh": (2, 4)},
    "iq4_xs": {"qs": (4, 0)}, "iq4_nl": {"qs": (4, 0)},
}  # fmt: skip
"""Which bits of the codes each field holds: (how many, from which one)."""


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", SEARCHED)
def test_error_is_no_larger_than_that_of_ggml(name: str) -> None:
    """The search would be worse than the one every other tool uses."""
    golden = json.loads(GOLDEN.read_text())[name]
    made = cases()
    assert golden.keys() == made.keys()
    for case, values in made.items():
        weighted, rms = errors(name, values, BLOCKS[name].encode(values))
        assert weighted <= golden[case][0], (case, weighted / golden[case][0])
        assert rms <= 1.01 * golden[case][1], (case, rms / golden[case][1])


@pytest.mark.parametrize("name", SEARCHED)
def test_error_beside_ggml_itself(name: str) -> None:
    """The table of its errors would be out of date, or our search good on that table alone."""
    for case, values in cases(seed=2).items():
        raw = ggml_encode(name, values)
        if raw is None:
            pytest.skip("llama-cpp-python is not installed")
        ours = BLOCKS[name].encode(values)
        rows = range(len(values))       # one at a time: a row of outliers must not hide the others
        ratios = [errors(name, values[i], ours[i])[0] / errors(name, values[i], raw[i])[0]
                  for i in rows]
        assert np.log(ratios).mean() <= 0, case


@pytest.mark.parametrize("name", SEARCHED)
def test_every_value_has_the_nearest_code(name: str) -> None:
    """Rounding, or the packing of bits, would be wrong; judged by the gguf package's decoder."""
    values = np.concatenate([v[:2] for v in cases(seed=3).values()])
    block = BLOCKS[name]
    kind = GGMLQuantizationType(block.ggml_type)
    raw = block.encode(values)
    chosen = np.abs(dequantize(raw, kind) - values)
    slack = 1e-6 * np.abs(values).max()
    for code in range(1 << sum(n for n, _ in CODES[name].values())):
        other = raw.copy()
        for field, (n_bits, first) in CODES[name].items():
            bits = (code >> first) & ((1 << n_bits) - 1)
            other.view(block.dtype)[field] = sum(bits << i for i in range(0, 8, n_bits))
        assert (chosen <= np.abs(dequantize(other, kind) - values) + slack).all(), code


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(SEARCHED), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
       data=st.data())
def test_bytes_do_not_depend_on_the_cut(name: str, shape: list[int], data: st.DataObject) -> None:
    """Chunks and threads would change a file."""
    block = BLOCKS[name]
    values = normal(*shape[:-1], shape[-1] * block.block_size, seed=sum(shape))
    whole = block.encode(values)
    assert whole.shape == (*shape[:-1], shape[-1] * block.nbytes)
    flat = values.reshape(-1, block.block_size)
    cut = data.draw(st.integers(0, len(flat)))
    parts = np.concatenate([block.encode(flat[:cut]), block.encode(flat[cut:])])
    np.testing.assert_array_equal(parts.reshape(whole.shape), whole)


@pytest.mark.parametrize("name", SEARCHED)
def test_bytes_do_not_depend_on_threads_and_chunks(name: str) -> None:
    rows = normal(300, 512)
    whole = BLOCKS[name].encode(rows)
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(BLOCKS[name].encode, np.array_split(rows, 7)))
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    strided = np.repeat(rows, 2, axis=0)[::2]
    np.testing.assert_array_equal(BLOCKS[name].encode(strided[5:6]), whole[5:6])


@pytest.mark.parametrize("name", SEARCHED)
def test_bytes_do_not_depend_on_the_processor(name: str) -> None:
    """A file would differ with NumPy's vector code. A better search changes these digests, too."""
    assert digest(name) == json.loads(GOLDEN.read_text())["digests"][name]


@pytest.mark.parametrize("name", SEARCHED)
def test_scaling_by_a_power_of_two_changes_only_the_scale(name: str) -> None:
    """Squares or fourth powers of small or large weights would overflow on the way."""
    values = normal(4, 1024) * np.float32(16)       # f16 scales lose digits below 2^-14
    wanted = BLOCKS[name].decode(BLOCKS[name].encode(values))
    for power in (1, 3, 9):
        scaled = np.ldexp(values, power)
        got = BLOCKS[name].decode(BLOCKS[name].encode(scaled))
        np.testing.assert_array_equal(np.ldexp(got, -power), wanted)


@pytest.mark.parametrize("name", SEARCHED)
def test_plain_rows(name: str) -> None:
    """Zeros must stay zeros, a constant must not be lost; neither divides by zero aloud."""
    block = BLOCKS[name]
    with np.errstate(all="raise"):
        assert not block.decode(block.encode(np.zeros((2, 512), np.float32))).any()
        assert not block.decode(block.encode(np.full((2, 512), -0.0, np.float32))).any()
        for constant in (1.0, -1.0, 1e-3, -300.0):
            values = np.full((2, 512), constant, np.float32)
            np.testing.assert_allclose(block.decode(block.encode(values)), values, rtol=0.02)


@pytest.mark.parametrize("name", SEARCHED)
def test_numbers_too_small_for_an_f16(name: str) -> None:
    """Zero is the nearest; what the smallest scale reaches must not be thrown away."""
    block = BLOCKS[name]
    with np.errstate(all="raise", under="ignore"):
        for tiny in (2.0**-149, 1e-40, 1e-30, 1e-12):
            values = (normal(2, 512) * np.float64(tiny)).astype(np.float32)
            assert np.abs(block.decode(block.encode(values))).max() <= 2.0**-20
        values = normal(2, 512) * np.float32(2.0**-20)
        got = block.decode(block.encode(values))
    assert np.abs(got - values).max() < 0.6 * np.abs(values).max()
    assert got.any()


@pytest.mark.parametrize("name", SEARCHED)
def test_numbers_too_large_for_an_f16(name: str) -> None:
    """Their scale is infinite: nothing may look like a weight."""
    block = BLOCKS[name]
    with np.errstate(all="raise"):
        for huge in (1e12, 1e30, 3e38):
            values = np.full((2, 512), huge, np.float32)
            values[:, 1::2] *= -0.5
            values[1, block.block_size :] = 1.0
            finite = np.isfinite(block.decode(block.encode(values)))
            assert not finite[0].any() and not finite[1, : block.block_size].any()
            assert finite[1, block.block_size :].all()
