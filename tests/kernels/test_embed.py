"""The embedding lookup decodes exactly as the format's NumPy decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ignis.errors import KernelError
from ignis.gguf.blocks import BLOCKS
from ignis.kernels.embed import embed
from ignis.kernels.panels import FORMATS as FORMATS_IN_BLOCKS
from tests.kernels.helpers import assert_same_bits, run, run_everywhere

FLOATS = ["f32", "f16", "bf16"]
FORMATS = [*FLOATS, *FORMATS_IN_BLOCKS]


def _check(name: str, raw: Any, n_embd: int) -> None:
    ids = np.array([3, 0, 3, 6], np.int32)
    y = np.zeros((len(ids), n_embd), np.float32)
    args = {"ids": ids, "weight": raw, "y": y, "n_embd": n_embd}
    got = run_everywhere(embed(format=name), args, len(ids))
    assert_same_bits(got, BLOCKS[name].decode(raw)[ids], f"embed {name}")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("n_embd", [32, 7, 17])
def test_rows_of_any_length(name: str, n_embd: int) -> None:
    values = np.random.default_rng(n_embd).standard_normal((7, n_embd)).astype(np.float32)
    _check(name, BLOCKS[name].encode(values), n_embd)


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_decode_alike(name: str) -> None:
    """Scales of a damaged file: infinities, NaNs and subnormal halves."""
    rng = np.random.default_rng(1)
    for n_embd in (256, 768, 96 if BLOCKS[name].block_size <= 32 else 512):
        raw = rng.integers(0, 256, (7, BLOCKS[name].row_nbytes(n_embd)), dtype=np.uint8)
        _check(name, raw, n_embd)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(KernelError, match="nvfp4"):
        run(embed(format="nvfp4"), "eager",
            {"ids": np.zeros(1, np.int32), "weight": np.zeros(1, np.uint8),
             "y": np.zeros(1, np.float32), "n_embd": 1}, 1, ["y"])  # fmt: skip
