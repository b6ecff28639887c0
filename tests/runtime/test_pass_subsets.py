"""Passes change what is run, never what comes out: any subset of them gives the same bits.

What would be broken: every pass claims to keep the bits; one that reorders a float sum, or fuses
what is still read elsewhere, shows here as logits that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from ignis.gguf import GGUFFile, open_gguf
from ignis.graph.models import ModelConfig, build_graph
from ignis.graph.passes import TOGGLES, run_pipeline
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.runtime.engine import EngineOptions, NativeEngine
from tests.random_models import BLOCK_FORMATS, FLOAT_FORMATS, random_models, write_random_model
from tests.runtime.engines import Logits, feed

N_TOKENS = 20


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GGUFFile]:
    """A model with every weight format; one with rope factors."""
    path = write_random_model(
        tmp_path_factory.mktemp("models") / "m.gguf", architecture=request.param,
        formats=BLOCK_FORMATS + FLOAT_FORMATS, n_layers=2, n_heads=6, n_kv_heads=2,
        rope_factors=request.param == "llama", seed=8,
    )  # fmt: skip
    with open_gguf(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def all_passes(file: GGUFFile, objects: Path) -> Logits:
    return _logits(file, objects, [])


def _logits(file: GGUFFile, objects: Path, disabled: list[str], n_threads: int = 2) -> Logits:
    """A step of 17 tokens and three of one each, with all passes but the disabled ones."""
    config = ModelConfig.from_gguf(file)
    graph, _ = run_pipeline(build_graph(config, file.tensors), disabled, check=True)
    options = EngineOptions(
        n_threads, 64, 1, host_target(), ObjectCache(objects), "plan_memory" not in disabled
    )  # fmt: skip
    engine = NativeEngine(file, config, graph, options)
    try:
        ids = np.random.default_rng(0).integers(0, 297, N_TOKENS).tolist()
        return feed(engine, ids, [17, 1, 1, 1])
    finally:
        engine.close()


SINGLE = [[name] for name in TOGGLES]
PAIRS = [list(names) for names in combinations(TOGGLES, 2)]
SUBSETS = {  # pairs take turns: each on one of the two models
    "llama": [*SINGLE, list(TOGGLES), *PAIRS[::2]], "qwen2": [*SINGLE, list(TOGGLES), *PAIRS[1::2]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "disabled"),
    [pytest.param(architecture, disabled, id=f"{architecture}: {'+'.join(disabled)}")
     for architecture, subsets in SUBSETS.items() for disabled in subsets],
    indirect=["file"],
)  # fmt: skip
def test_single_passes_and_pairs(
    file: GGUFFile, objects: Path, all_passes: Logits, disabled: list[str]
) -> None:
    """Each pass alone, each pair, and all of them switched off."""
    assert np.array_equal(_logits(file, objects, disabled), all_passes)


@pytest.mark.parametrize("part", range(8))
def test_random_subsets(tmp_path: Path, objects: Path, part: int) -> None:
    """200 subsets over random models of all shapes, 25 of them here."""
    rng = np.random.default_rng(part)
    for options, path in random_models(tmp_path, 5, seed=400 + 5 * part):
        with open_gguf(path) as file:
            wanted = _logits(file, objects, [])
            assert np.isfinite(wanted).all()
            for _ in range(5):
                off = [name for name in TOGGLES if rng.random() < 0.5]
                n_threads = int(rng.integers(1, 4))
                got = _logits(file, objects, off, n_threads)
                assert np.array_equal(got, wanted), (options, off, n_threads)
