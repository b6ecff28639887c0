"""Float weights are copied into memory of our own byte by byte, and nothing behind them."""

from __future__ import annotations

import numpy as np
import pytest

from ignis.kernels.copy import UNIT_NBYTES, copy_bytes
from tests.kernels.helpers import run_everywhere


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, UNIT_NBYTES, UNIT_NBYTES + 130])
def test_all_bytes_and_no_more(nbytes: int) -> None:
    x = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    args = {"x": x, "y": np.zeros(nbytes, np.uint8), "n_bytes": nbytes}
    got = run_everywhere(copy_bytes(), args, -(-nbytes // UNIT_NBYTES))
    assert np.array_equal(got, x)
