"""Caches of f32, f16 and q8_0: each keeps the contract of the same bits, and says what it costs.

What would be broken: a reproducible answer with `--kv-type`, or the memory that it promises.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ignis
from ignis.compile import compile_model
from ignis.errors import UsageError
from ignis.gguf import open_gguf
from ignis.inspect.compilation import inspect_model
from ignis.inspect.memory import kv_cache_nbytes
from ignis.native.host import host_target
from ignis.runtime.engine import NativeEngine
from ignis.runtime.work import StepSize, step_work
from ignis.settings import Settings
from ignis.target import Target
from tests.random_models import write_random_model
from tests.runtime.engines import Logits, engine, feed, mean_kl, random_chunks

N_TOKENS = 70
KV_TYPES = ("f32", "f16", "q8_0")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("models") / "m.gguf", formats=("q8_0", "f32"), n_layers=2,
        n_embd=96, n_heads=6, n_kv_heads=2, head_dim=32, n_ff=160, seed=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(0).integers(0, 297, N_TOKENS).tolist()


def _plain(model: Path, objects: Path, ids: list[int], kv_type: str) -> Logits:
    with engine(model, objects, engine="imperative", n_threads=1, weights="mapped",
                kv_type=kv_type) as plain:  # fmt: skip
        return feed(plain, ids, [35, 35])


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_the_same_bits_however_it_is_run(
    model: Path, objects: Path, ids: list[int], kv_type: str
) -> None:
    """Threads, layouts, chunks, engines, passes, a prefix kept in the cache, the lowest level."""
    rng = np.random.default_rng(1)
    wanted = _plain(model, objects, ids, kv_type)
    assert not np.array_equal(wanted, _plain(model, objects, ids, "f16"))
    for n_threads, weights in ((1, "packed"), (2, "mapped"), (3, "packed")):
        with engine(model, objects, n_threads=n_threads, weights=weights,
                    kv_type=kv_type) as runner:  # fmt: skip
            assert np.array_equal(feed(runner, ids), wanted)
            assert np.array_equal(feed(runner, ids, [1] * N_TOKENS), wanted)
            assert np.array_equal(feed(runner, ids, random_chunks(rng, N_TOKENS)), wanted)
    with engine(model, objects, n_slots=2, disabled_passes=["rope_store"],
                kv_type=kv_type) as runner:  # fmt: skip
        feed(runner, ids[::-1])  # pages are used again
        assert np.array_equal(feed(runner, ids, slot=1), wanted)
        assert np.array_equal(feed(runner, ids, random_chunks(rng, N_TOKENS)), wanted)
    if host_target().is_x86:
        target = Target.level("x86-64-v2", host_target().triple.split("-", 1)[1])
        with engine(model, objects, target=target, kv_type=kv_type) as runner:
            assert np.array_equal(feed(runner, ids, [40, 1, 29]), wanted)


def test_the_finer_type_is_nearer_to_float64(
    model: Path, objects: Path, ids: list[int]
) -> None:
    with engine(model, objects, engine="reference") as reference:
        exact = feed(reference, ids)
    f32, f16, q8_0 = (mean_kl(exact, _plain(model, objects, ids, name)) for name in KV_TYPES)
    assert q8_0 < 1e-3 and abs(f16 - f32) < 1e-4


@pytest.mark.parametrize(("kv_type", "nbytes"), [("f32", 4), ("f16", 2), ("q8_0", 34 / 32)])
def test_what_a_position_costs(
    model: Path, objects: Path, kv_type: str, nbytes: float
) -> None:
    """The cache, `ignis info` and the count of work go by one number."""
    per_position = int(2 * 2 * 2 * 32 * nbytes)  # keys and values, layers, heads, width
    with engine(model, objects, kv_type=kv_type, n_ctx=100) as runner:
        assert isinstance(runner, NativeEngine)
        assert runner.cache.position_nbytes == per_position
        work = step_work(runner.graph, StepSize(1, 49))
        assert work.kv_nbytes == 50 * per_position
    with open_gguf(model) as file:
        compilation = inspect_model(file, n_ctx=100, kv_type=kv_type)
        assert kv_cache_nbytes(compilation, 100) == 112 * per_position


def test_what_does_not_fit_is_refused(tmp_path: Path, model: Path) -> None:
    """One line each; heads of 48 are no whole blocks."""
    narrow = write_random_model(tmp_path / "m.gguf", n_heads=2, n_kv_heads=1, head_dim=48)
    for path, kv_type, message in (
        (narrow, "q8_0", "got 48, wanted a multiple of 32"), (model, "q4_0", "got q4_0"),
    ):  # fmt: skip
        with open_gguf(path) as file, pytest.raises(UsageError, match=message):
            compile_model(file, Settings(cache_dir=tmp_path), kv_type=kv_type)
    with engine(narrow, tmp_path, kv_type="f32") as runner:
        assert np.isfinite(feed(runner, [1, 2, 3])).all()


def test_the_python_api_takes_a_type(default_model: Path) -> None:
    """A whole answer with a cache of bytes; the same again, for the same seed."""
    with ignis.load(default_model, n_ctx=256, kv_type="q8_0") as loaded:
        texts = {"".join(loaded.generate("The sea is", max_tokens=8)) for _ in range(2)}
        assert len(texts) == 1 and texts.pop()
        assert loaded.config.kv_type == "q8_0"
