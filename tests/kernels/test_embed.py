"""The embedding lookup decodes exactly as the format's NumPy decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ignis.errors import KernelError
from ignis.gguf.blocks import BLOCKS
from ignis.kernels.embed import embed
from tests.kernels.helpers import assert_same_bits, run, run_everywhere

FORMATS = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"]


def _check(name: str, raw: Any, n_embd: int) -> None:
    ids = np.array([3, 0, 3, 6], np.int32)
    y = np.zeros((len(ids), n_embd), np.float32)
    args = {"ids": ids, "weight": raw, "y": y, "n_embd": n_embd}
    got = run_everywhere(embed(format=name), args, len(ids))
    assert_same_bits(got, BLOCKS[name].decode(raw)[ids], f"embed {name}")


@pytest.mark.parametrize(
    ("name", "n_embd"),
    [(name, n) for name in FORMATS for n in (32, 96, 7, 17) if n % BLOCKS[name].block_size == 0],
)
def test_equals_the_decoder(name: str, n_embd: int) -> None:
    fmt = BLOCKS[name]
    values = np.random.default_rng(n_embd).standard_normal((7, n_embd)).astype(np.float32)
    _check(name, fmt.encode(values), n_embd)


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_decode_alike(name: str) -> None:
    """Scales of a damaged file: infinities, NaNs and subnormal halves."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (7, BLOCKS[name].row_nbytes(256)), dtype=np.uint8)
    _check(name, raw, 256)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(KernelError, match="q6_k"):
        run(embed(format="q6_k"), "eager",
            {"ids": np.zeros(1, np.int32), "weight": np.zeros(1, np.uint8),
             "y": np.zeros(1, np.float32), "n_embd": 1}, 1, ["y"])  # fmt: skip
