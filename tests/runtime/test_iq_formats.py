"""The formats whose codes are points of a grid, in whole models.

If these fail, a file of IQ1, IQ2 or IQ3 weights gives another text packed than mapped, or a wrong
one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ignis.compile import compile_model
from ignis.gguf import open_gguf
from ignis.runtime.engine import ImperativeEngine
from ignis.settings import Settings
from tests.random_models import write_random_model
from tests.runtime.engines import engine, feed, random_chunks
from tests.runtime.test_accuracy import check_every_op

FORMATS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
IDS = np.random.default_rng(5).integers(0, 297, 40).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of all the formats, and objects for all tests here."""
    folder = tmp_path_factory.mktemp("iq")
    write_random_model(folder / "m.gguf", formats=FORMATS, n_layers=3, n_embd=256, n_heads=8,
                       n_ff=512, tied=False, seed=1)  # fmt: skip
    with open_gguf(folder / "m.gguf") as file:
        assert {t.format.name for t in file.tensors.values()} == {*FORMATS, "f32"}
    return folder


def test_layouts_engines_and_steps_give_the_same_bits(folder: Path) -> None:
    """Mapped rows and packed panels, op by op and planned, whole, by token and in chunks."""
    with engine(folder / "m.gguf", folder, engine="imperative", weights="mapped") as runner:
        wanted = feed(runner, IDS)
    assert np.isfinite(wanted).all() and wanted.std() > 0.1
    rng = np.random.default_rng(6)
    for weights in ("mapped", "packed"):
        with engine(folder / "m.gguf", folder, weights=weights) as runner:
            for chunks in (None, [1] * len(IDS), random_chunks(rng, len(IDS))):
                assert np.array_equal(feed(runner, IDS, chunks), wanted), (weights, chunks)


def test_every_op_agrees_with_float64(folder: Path) -> None:
    """Each op on the engine's own inputs, within what f32 may err."""
    with open_gguf(folder / "m.gguf") as file:
        runner, _, _ = compile_model(file, Settings(cache_dir=folder), engine="imperative")
        assert isinstance(runner, ImperativeEngine)
        check_every_op(runner, file)
        runner.close()
