"""Pages of keys and values: handed out clean, kept apart, taken back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ignis.errors import UsageError
from ignis.kernels.kv_pages import PAGE
from ignis.runtime.kv_cache import KVCache
from tests.random_models import write_random_model
from tests.runtime.engines import engine, feed


def new_cache(
    n_layers: int, n_kv_heads: int, head_dim: int, *, n_ctx: int, n_slots: int = 1
) -> KVCache:
    return KVCache(
        n_layers=n_layers, n_heads=2 * n_kv_heads, n_kv_heads=n_kv_heads, head_dim=head_dim,
        n_ctx=n_ctx, n_slots=n_slots,
    )  # fmt: skip


def pages_of(cache: KVCache, slot: int) -> list[int]:
    return cache._table[slot, : cache._held[slot]].tolist()


def test_pages_are_handed_out_in_order_and_never_twice() -> None:
    cache = new_cache(2, 3, 32, n_ctx=100, n_slots=2)
    assert (cache.pages_per_slot, cache.n_pages) == (7, 14)
    cache.reserve(0, 1)
    cache.reserve(0, PAGE)
    assert pages_of(cache, 0) == [0]
    cache.reserve(0, PAGE + 1)
    cache.reserve(1, 100)
    cache.reserve(0, 100)
    assert pages_of(cache, 0)[:2] == [0, 1]
    assert sorted(pages_of(cache, 0) + pages_of(cache, 1)) == list(range(14))


def test_truncation_keeps_the_page_that_is_begun() -> None:
    cache = new_cache(1, 1, 32, n_ctx=64)
    cache.reserve(0, 64)
    cache.truncate(0, PAGE + 1)
    assert pages_of(cache, 0) == [0, 1]
    cache.truncate(0, 64)  # more than it holds: nothing happens
    assert pages_of(cache, 0) == [0, 1]
    cache.reserve(0, 64)
    assert pages_of(cache, 0) == [0, 1, 2, 3]
    cache.truncate(0, 0)
    assert pages_of(cache, 0) == []


def test_a_page_is_zero_when_it_comes_again() -> None:
    """In every layer and head, and no other page is touched."""
    cache = new_cache(2, 3, 32, n_ctx=48)
    cache.reserve(0, 48)
    pool = cache._pool.bytes[: 2 * 3 * 3 * cache._page_nbytes].reshape(6, 3, cache._page_nbytes)
    pool[:] = 255
    cache.truncate(0, PAGE)
    cache.reserve(0, 2 * PAGE)
    assert pages_of(cache, 0) == [0, 1]
    assert (pool[:, 1] == 0).all() and (pool[:, [0, 2]] == 255).all()


def test_layers_lie_one_behind_the_other() -> None:
    cache = new_cache(3, 2, 64, n_ctx=32)
    page_nbytes = 2 * PAGE * 64 * 2  # keys and values, f16
    assert cache.base(2) - cache.base(1) == 2 * 2 * page_nbytes
    assert cache.position_nbytes == 3 * 2 * 64 * 2 * 2


def test_the_context_is_the_limit() -> None:
    cache = new_cache(1, 1, 32, n_ctx=20)
    cache.reserve(0, 20)
    with pytest.raises(UsageError, match="got 21, wanted at most 20"):
        cache.reserve(0, 21)


def test_any_use_of_slots_keeps_pages_apart() -> None:
    """Random growth and truncation of several sequences."""
    rng = np.random.default_rng(0)
    cache = new_cache(1, 2, 32, n_ctx=96, n_slots=4)
    lengths = [0] * 4
    for _ in range(500):
        slot, n = int(rng.integers(4)), int(rng.integers(97))
        if n >= lengths[slot]:
            cache.reserve(slot, n)
        else:
            cache.truncate(slot, n)
        lengths[slot] = n
        held = [page for s in range(4) for page in pages_of(cache, s)]
        assert len(held) == len(set(held)) and len(held) + len(cache._free) == cache.n_pages
        assert [len(pages_of(cache, s)) for s in range(4)] == [-(-n // PAGE) for n in lengths]


def test_counters_of_a_step_that_was_aborted_do_no_harm(tmp_path: Path) -> None:
    """Split attention counts finished segments; Ctrl-C leaves the counts anywhere."""
    path = write_random_model(tmp_path / "m.gguf")
    ids = np.random.default_rng(0).integers(0, 297, 300).tolist()
    with engine(path, tmp_path, n_threads=2) as runner:
        wanted = feed(runner, ids, [60] * 4 + [1] * 60)
        runner.cache._arrived.bytes[:] = 1
        assert np.array_equal(feed(runner, ids, [60] * 4 + [1] * 60), wanted)
