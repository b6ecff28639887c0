"""The KV cache's pages and attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ignis.errors import KernelError
from ignis.graph.ir.kv_types import through_cache
from ignis.kernels.attention import attend, attend_scratch_nbytes
from ignis.kernels.eager import fma_f32
from ignis.kernels.kv_pages import kv_store, page_nbytes
from tests.kernels.helpers import assert_same_bits, levels, run, run_everywhere
from tests.kernels.test_math import exp1


@dataclass(frozen=True)
class Cache:
    """Two slots with their keys and values, and pages scattered over the pool."""

    keys: Any  # f32[slot, position, K, C]
    values: Any
    base: Any
    pages: Any

    @classmethod
    def filled(
        cls, n_positions: int, n_kv_heads: int, head_dim: int, seed: int = 0,
        kv_type: str = "f16",
    ) -> Cache:  # fmt: skip
        rng = np.random.default_rng(seed)
        per_slot = -(-n_positions // 16)
        shape = (2, n_positions, n_kv_heads, head_dim)
        keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        pages = rng.permutation(2 * per_slot + 3)[: 2 * per_slot].astype(np.int32)
        n_pages = 2 * per_slot + 3
        # Bytes that no one stored are NaNs: touching a masked key shows.
        base = np.full(n_kv_heads * n_pages * page_nbytes(head_dim, kv_type), 0xFF, np.uint8)
        cache = cls(keys, values, base, pages.reshape(2, per_slot))
        args = {**cache.table(), "k": keys, "v": values,
                "positions": np.tile(np.arange(n_positions, dtype=np.int32), 2),
                "slots": np.repeat(np.arange(2, dtype=np.int32), n_positions)}  # fmt: skip
        kernel = kv_store(head_dim=head_dim, kv_type=kv_type)
        base[:] = run(kernel, "host", args, 2 * n_positions, ["base"])["base"]
        return cache

    def table(self) -> dict[str, Any]:
        per_slot = self.pages.shape[1]
        return {"base": self.base, "pages": self.pages, "pages_per_slot": per_slot,
                "n_pages": 2 * per_slot + 3, "n_kv_heads": self.keys.shape[2]}  # fmt: skip

    def case(self, n_heads: int, tokens: list[tuple[int, int]], scale: float) -> dict[str, Any]:
        """Arguments of `attend` for tokens given as (slot, position)."""
        slots, positions = np.array(tokens, np.int32).T
        shape = (len(tokens), n_heads * self.keys.shape[3])
        q = np.random.default_rng(9).standard_normal(shape).astype(np.float32)
        return {**self.table(), "q": q, "y": np.zeros_like(q), "n_heads": n_heads, "scale": scale,
                "n_tokens": len(tokens),
                "slots": slots.copy(), "positions": positions.copy()}  # fmt: skip


def _attend(
    cache: Cache, case: dict[str, Any], group: int, level: str = "host", **static: Any
) -> Any:
    head_dim = cache.keys.shape[3]
    kernel = attend(head_dim=head_dim, group=group, **static)
    units = len(case["q"]) * case["n_heads"] // group
    return run(kernel, level, case, units, ["y"], attend_scratch_nbytes(group, head_dim))["y"]


def _float64(
    cache: Cache, case: dict[str, Any], window: int = 0, softcap: float = 0.0
) -> Any:
    """Softmax attention on the rounded keys and values."""
    n_kv_heads, head_dim = cache.keys.shape[2:]
    keys, values = (x.astype(np.float16).astype(np.float64) for x in (cache.keys, cache.values))
    q = case["q"].reshape(len(case["q"]), case["n_heads"], head_dim)
    y = np.zeros(q.shape)
    for t, (slot, position) in enumerate(zip(case["slots"], case["positions"], strict=True)):
        for h in range(case["n_heads"]):
            first = max(0, position + 1 - window) if window else 0
            seen = (slot, slice(first, position + 1), h * n_kv_heads // case["n_heads"])
            score = keys[seen] @ q[t, h].astype(np.float64) * case["scale"]
            if softcap:
                score = softcap * np.tanh(score / softcap)
            weight = np.exp(score - score.max())
            y[t, h] = weight @ values[seen] / weight.sum()
    return y.reshape(case["q"].shape)


@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_store_rounds_and_places_every_value(head_dim: int) -> None:
    """The layout of a page is what `attend` and page sharing between sequences rely on."""
    cache = Cache.filled(21, 2, head_dim)
    n_pages = cache.table()["n_pages"]
    pool = cache.base.view(np.float16).reshape(2, n_pages, 2, 16 * head_dim)
    for slot in range(2):
        for position in range(21):
            page, row = cache.pages[slot, position // 16], position % 16
            for head in range(2):
                k_page, v_page = pool[head, page]
                key = cache.keys[slot, position, head].astype(np.float16)
                value = cache.values[slot, position, head].astype(np.float16)
                assert np.array_equal(k_page.reshape(head_dim, 16)[:, row], key)
                assert np.array_equal(v_page.reshape(16, head_dim)[row], value)
    stored = 2 * 2 * 21 * 2 * head_dim
    assert np.isfinite(pool).sum() == stored, "something else was overwritten"


def test_store_has_the_same_bits_everywhere() -> None:
    cache = Cache.filled(17, 2, 32)
    args = {**cache.table(), "k": cache.keys[1] * 1e5, "v": cache.values[1] * 1e-7,
            "positions": np.arange(17, dtype=np.int32)[::-1].copy(),
            "slots": np.ones(17, np.int32)}  # fmt: skip
    run_everywhere(kv_store(head_dim=32, kv_type="f16"), args, 17, "base")


@pytest.mark.parametrize(
    ("head_dim", "n_heads", "n_kv_heads", "group", "positions"),
    [
        (16, 2, 1, 2, [0, 1, 14, 15, 16, 17]),
        (32, 4, 2, 1, [31, 32, 33, 63, 64, 65]),
        (64, 3, 1, 3, [79]),
        (16, 1, 1, 1, [254, 255, 256, 257]),
        (48, 2, 1, 2, [18]),
    ],
)
def test_all_forms_give_the_same_bits(
    head_dim: int, n_heads: int, n_kv_heads: int, group: int, positions: list[int]
) -> None:
    """Page, chain and segment boundaries, on the twin and at every level."""
    cache = Cache.filled(max(positions) + 3, n_kv_heads, head_dim)
    tokens = [(i % 2, position) for i, position in enumerate(positions)]
    case = cache.case(n_heads, tokens, head_dim**-0.5)
    wanted = _attend(cache, case, group, "eager")
    for level in levels():
        assert_same_bits(_attend(cache, case, group, level), wanted, f"attend on {level}")


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_is_close_to_float64(head_dim: int) -> None:
    """Errors stay within a few roundings of the largest value, over several segments."""
    cache = Cache.filled(800, 2, head_dim)
    tokens = [(t % 2, p) for t, p in enumerate([0, 15, 16, 255, 256, 257, 511, 512, 700, 799])]
    case = cache.case(6, tokens, head_dim**-0.5)
    got, wanted = _attend(cache, case, 3), _float64(cache, case)
    bound = (head_dim + 800 / 16) * 2.0**-24 * np.abs(cache.values).max()
    assert np.abs(got - wanted).max() <= bound


WINDOWED = [(t % 2, p) for t, p in enumerate([0, 15, 16, 40, 255, 256, 300, 511, 512, 520, 799])]


@pytest.mark.parametrize(("window", "softcap"), [
    (1, 0.0), (15, 0.0), (16, 2.0), (17, 0.0), (255, 0.0), (256, 0.0), (300, 3.0), (900, 0.0),
    (0, 1.5),
])  # fmt: skip
def test_windows_and_softcaps_are_close_to_float64(window: int, softcap: float) -> None:
    """Windows that begin inside a page, at a page, at a segment, and before all keys."""
    cache = Cache.filled(800, 2, 32)
    case = cache.case(4, WINDOWED, 1.0)
    got = _attend(cache, case, 2, window=window, softcap=softcap)
    wanted = _float64(cache, case, window, softcap)
    assert np.abs(got - wanted).max() <= 600 * 2.0**-24 * np.abs(cache.values).max()


@pytest.mark.parametrize("window", [3, 20])
def test_windows_have_the_same_bits_everywhere(window: int) -> None:
    cache = Cache.filled(300, 1, 16)
    case = cache.case(2, [(0, 2), (1, 30), (0, 258), (1, 290)], 0.5)
    wanted = _attend(cache, case, 2, "eager", window=window, softcap=2.0)
    for level in levels():
        got = _attend(cache, case, 2, level, window=window, softcap=2.0)
        assert_same_bits(got, wanted, f"window {window} on {level}")


def test_keys_before_the_window_are_selected_away() -> None:
    """NaNs and absent pages outside the window must not be seen: 0 * NaN is NaN."""
    cache = Cache.filled(600, 1, 32)
    case = cache.case(2, [(0, 599)], 0.2)
    wanted = _attend(cache, case, 2, window=40)
    pool = case["base"].copy().view(np.uint16).reshape(-1, 2, 16 * 32)
    pool[cache.pages[0, 35], 1] = 0x7E00  # values of positions 560 to 575
    pool[cache.pages[0, 35], 0] = 0x7E00
    table = cache.pages.copy()
    table[0, :35] = -(2**30)  # following it would leave the pool
    spoilt = {**case, "base": pool.view(np.uint8).reshape(-1), "pages": table}
    alone = _attend(cache, spoilt, 2, window=24)
    assert np.isfinite(alone).all() and np.isfinite(wanted).all()
    assert_same_bits(alone, _attend(cache, case, 2, window=24), "spoilt")
    assert np.isnan(_attend(cache, spoilt, 2, window=25)).any(), "the window ends too early"


def test_the_group_does_not_change_the_bits() -> None:
    """How many heads a unit takes is a matter of speed; so is who computes which unit."""
    cache = Cache.filled(300, 2, 32)
    case = cache.case(12, [(0, 299), (1, 20)], 0.2)
    one = _attend(cache, case, 1)
    for group in (2, 3, 6):
        assert_same_bits(_attend(cache, case, group), one, f"group {group}")
    in_place = _attend(cache, {**case, "y": case["q"]}, 3)
    assert_same_bits(in_place, one, "in place")
    for t in range(2):
        alone = cache.case(12, [(0, 299), (1, 20)][t : t + 1], 0.2)
        alone["q"] = case["q"][t : t + 1].copy()
        assert_same_bits(_attend(cache, alone, 3)[0], one[t], "alone")


def _one_by_one(cache: Cache, case: dict[str, Any], group: int, **static: Any) -> Any:
    """Every token in a step of its own."""
    rows = []
    for t in range(len(case["q"])):
        names = ("q", "y", "slots", "positions")
        alone = case | {name: case[name][t : t + 1].copy() for name in names}
        rows.append(_attend(cache, {**alone, "n_tokens": 1}, group, **static)[0])
    return np.stack(rows)


RUNS = [  # (slot, first position, tokens): blocks, cut by pages, by 16 to 64 positions, by segments
    [(0, 0, 40)],
    [(1, 7, 3), (0, 250, 30), (1, 10, 1)],
    [(0, 540, 33), (1, 15, 2), (1, 32, 1), (1, 33, 16)],
    [(0, 5, 1), (1, 5, 1), (0, 6, 1), (1, 6, 1), (0, 7, 2), (0, 10, 2)],
    [(0, 190, 70)],
]


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("group", "head_dim", "window", "softcap"), [
    (1, 16, 0, 0.0), (2, 48, 0, 0.0), (3, 64, 0, 0.0), (7, 32, 0, 0.0), (3, 32, 1, 0.0),
    (2, 16, 20, 0.0), (4, 16, 40, 2.0), (1, 16, 300, 0.0), (8, 16, 256, 0.0), (1, 256, 0, 1.5),
    (1, 64, 100, 0.0),
])  # fmt: skip
def test_blocks_of_queries_give_the_bits_of_single_ones(
    runs: list[tuple[int, int, int]], group: int, head_dim: int, window: int, softcap: float
) -> None:
    """Tokens that stand together share tiles of keys and values, and nothing else."""
    cache = Cache.filled(580, 2, head_dim)
    tokens = [(slot, first + i) for slot, first, n in runs for i in range(n)]
    case = cache.case(2 * group, tokens, head_dim**-0.5)
    static = {"window": window, "softcap": softcap}
    wanted = _one_by_one(cache, case, group, **static)
    assert_same_bits(_attend(cache, case, group, **static), wanted, f"{runs}")
    if group > 1:
        assert_same_bits(_attend(cache, case, 1, **static), wanted, f"{runs}, head by head")


@pytest.mark.parametrize("begin", [1, 5, 31, 47, 80])
def test_units_may_be_handed_out_in_any_pieces(begin: int) -> None:
    """Threads take units as they come: a block ends where a piece does."""
    cache = Cache.filled(60, 2, 16)
    case = cache.case(4, [(0, 10 + i) for i in range(48)], 0.3)
    wanted = _attend(cache, case, 2)
    kernel, scratch = attend(head_dim=16, group=2), attend_scratch_nbytes(2, 16)
    first = run(kernel, "host", case, begin, ["y"], scratch)["y"]
    rest = run(kernel, "host", {**case, "y": first}, 96, ["y"], scratch, begin=begin)["y"]
    assert_same_bits(rest, wanted, f"cut at {begin}")


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 2.0)])
def test_blocks_have_the_same_bits_everywhere(window: int, softcap: float) -> None:
    cache = Cache.filled(290, 1, 16)
    case = cache.case(2, [(0, p) for p in (0, 1, 2)] + [(1, p) for p in range(248, 262)], 0.3)
    static = {"window": window, "softcap": softcap}
    wanted = _attend(cache, case, 2, "eager", **static)
    for level in levels():
        assert_same_bits(_attend(cache, case, 2, level, **static), wanted, f"block on {level}")


def test_a_window_may_begin_behind_a_tile_of_values() -> None:
    """For the last of many queries; a wider register has tiles of fewer keys."""
    cache = Cache.filled(256, 1, 64)
    case = cache.case(1, [(0, p) for p in range(192, 256)], 0.125)
    wanted = _attend(cache, case, 1, "eager", window=100)
    assert_same_bits(_attend(cache, case, 1, window=100), wanted, "a window of 100")


def test_a_block_sees_no_later_keys_and_no_absent_pages() -> None:
    """Each query of a block has its own end, and with a window its own beginning."""
    cache = Cache.filled(80, 1, 16)
    case = cache.case(2, [(0, p) for p in range(34, 50)], 0.3)
    pool = case["base"].copy().view(np.uint16).reshape(-1, 2, 16 * 16)
    pool[cache.pages[0, 3], 0].reshape(16, 16)[:, 2:] = 0x7E00
    pool[cache.pages[0, 3], 1].reshape(16, 16)[2:] = 0x7E00
    table = cache.pages.copy()
    table[0, 4:] = -(2**30)  # following it would leave the pool
    spoilt = {**case, "base": pool.view(np.uint8).reshape(-1), "pages": table}
    assert_same_bits(_attend(cache, spoilt, 2), _attend(cache, case, 2), "later keys")
    table[0, :1] = -(2**30)
    pool[cache.pages[0, 1], 0].reshape(16, 16)[:, :10] = 0x7E00
    pool[cache.pages[0, 1], 1].reshape(16, 16)[:10] = 0x7E00
    wanted = _attend(cache, case, 2, window=9)
    assert_same_bits(_attend(cache, spoilt, 2, window=9), wanted, "earlier keys")


def _plain(cache: Cache, case: dict[str, Any], t: int, h: int) -> Any:
    """NUMERICS 6 for one token and head in scalar code, key by key."""
    slot, last, head_dim = case["slots"][t], case["positions"][t], cache.keys.shape[3]
    kv = h * cache.keys.shape[2] // case["n_heads"]
    keys, values = (x[slot, :, kv].astype(np.float16).astype(np.float32)
                    for x in (cache.keys, cache.values))  # fmt: skip
    q = case["q"][t].reshape(-1, head_dim)[h]

    def exp(x: Any) -> Any:
        x = np.array([x], np.float32)
        return run(exp1(), "host", {"x": x, "y": x}, 1, ["y"])["y"][0]

    merged: Any = None
    for first in range(0, last + 1, 256):
        segment = range(first, min(first + 256, last + 1))
        scores = []
        for key in segment:
            score = np.float32(0)
            for d in range(head_dim):
                score = fma_f32(q[d], keys[key, d], score)[()]
            scores.append(score * np.float32(case["scale"]))
        m = max(scores)
        weights = [exp(score - m) for score in scores]
        lanes = [np.float32(0)] * 16
        o = np.zeros(head_dim, np.float32)
        for index, (key, weight) in enumerate(zip(segment, weights, strict=True)):
            lanes[index % 16] += weight
            o = fma_f32(weight, values[key], o)
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        total = lanes[0]
        if merged is not None:
            m1, l1, o1 = merged
            m2, m = m, max(m1, m)
            a1, a2 = exp(m1 - m), exp(m2 - m)
            total = fma_f32(l1, a1, total * a2)[()]
            o = fma_f32(o1, a1, o * a2)
        merged = m, total, o
    return merged[2] / merged[1]


def test_equals_plain_scalar_code() -> None:
    """The order NUMERICS defines, written down a second time without vectors or pages."""
    cache = Cache.filled(520, 1, 16)
    tokens = [(0, 0), (1, 37), (0, 270), (1, 515)]
    case = cache.case(2, tokens, 0.25)
    got = _attend(cache, case, 2).reshape(4, 2, 16)
    for t in range(4):
        plain = _plain(cache, case, t, 1)
        assert_same_bits(got[t, 1].copy(), plain, f"token {tokens[t]}")


def test_later_keys_and_absent_pages_are_never_touched() -> None:
    """Pages beyond the query may be unassigned, and rows beyond it hold another's NaN."""
    cache = Cache.filled(40, 1, 32)
    case = cache.case(2, [(0, 18)], 0.2)
    wanted = _attend(cache, case, 2)
    assert np.isfinite(wanted).all()
    pool = case["base"].copy().view(np.uint16).reshape(-1, 2, 16 * 32)
    page = cache.pages[0, 1]
    pool[page, 0].reshape(32, 16)[:, 3:] = 0x7E00
    pool[page, 1].reshape(16, 32)[3:] = 0x7E00
    table = cache.pages.copy()
    table[0, 2:] = -(2**30)  # following it would leave the pool
    spoilt = {**case, "base": pool.view(np.uint8).reshape(-1), "pages": table}
    for level in ("eager", *levels()):
        assert_same_bits(_attend(cache, spoilt, 2, level), wanted, f"spoilt, {level}")


def test_extreme_scores() -> None:
    """One key takes all the weight; a NaN or infinite query gives NaN, never a wrong number."""
    cache = Cache.filled(300, 1, 16)
    case = cache.case(1, [(0, 299)] * 4, 1.0)
    case["q"][0] *= 1e4
    case["q"][1, 3] = np.nan
    case["q"][2, 5] = np.inf
    case["q"][3] = 0
    wanted = _attend(cache, case, 1, "eager")
    for level in levels():
        assert_same_bits(_attend(cache, case, 1, level), wanted, f"extremes, {level}")
    first = {name: case[name][:1] for name in ("q", "slots", "positions")}
    assert np.abs(wanted[:1] - _float64(cache, case | first)).max() < 1e-5
    assert np.isnan(wanted[1]).all() and np.isnan(wanted[2]).all()
    mean = cache.values[0, :, 0].astype(np.float16).astype(np.float64).mean(axis=0)
    assert np.allclose(wanted[3], mean, atol=1e-6)


def _read_back(cache: Cache, kv_type: str) -> tuple[Any, Any]:
    """Keys and values [slot, position, K, C] as the pages hold them, by their documented layout."""
    _, n_positions, n_heads, c = cache.keys.shape
    half = page_nbytes(c, kv_type) // 2
    pool = cache.base.reshape(n_heads, -1, 2, half)
    keys, values = np.zeros_like(cache.keys), np.zeros_like(cache.values)
    for slot, position, head in np.ndindex(2, n_positions, n_heads):
        (k, v), row = pool[head, cache.pages[slot, position // 16]], position % 16
        if kv_type == "f32":
            keys[slot, position, head] = k.view(np.float32).reshape(c, 16)[:, row]
            values[slot, position, head] = v.view(np.float32).reshape(16, c)[row]
            continue
        blocks, line = k.reshape(c // 32, 16 * 34), v.reshape(16, c // 32 * 34)[row]
        scales = blocks[:, :32].copy().view(np.float16)[:, row]
        keys[slot, position, head] = _scaled(scales, blocks[:, 32:].reshape(-1, 32, 16)[..., row])
        scales = line[: c // 16].copy().view(np.float16)
        values[slot, position, head] = _scaled(scales, line[c // 16 :].reshape(-1, 32))
    return keys, values


def _scaled(d: Any, q: Any) -> Any:
    with np.errstate(invalid="ignore"):  # an infinite scale makes NaNs
        return (d.astype(np.float32)[:, None] * q.view(np.int8)).reshape(-1)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_other_types_hold_what_their_meaning_says(kv_type: str) -> None:
    """The kernel's rounding is the interpreter's, value for value, and fills its pages exactly."""
    cache = Cache.filled(21, 2, 64, kv_type=kv_type)
    for stored, given in zip(_read_back(cache, kv_type), (cache.keys, cache.values), strict=True):
        meant = through_cache(given.reshape(-1, 64).astype(np.float64), kv_type)
        assert np.array_equal(stored.reshape(-1, 64), meant)
        if kv_type == "q8_0":
            blocks = np.abs(given.reshape(-1, 32))
            error = np.abs(stored - given).reshape(-1, 32)
            assert (error <= blocks.max(-1, keepdims=True) * (0.5 / 127 + 2.0**-11)).all()
        else:
            assert np.array_equal(stored, given)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_other_types_store_the_same_bits_everywhere(kv_type: str) -> None:
    """Subnormal scales, zero blocks, NaN, infinities, and scales beyond f16 included."""
    cache = Cache.filled(12, 1, 64, kv_type=kv_type)
    keys = cache.keys[1].reshape(12, 64).copy()
    keys[:8] *= np.array([1e-6, 1e-5, 3e-8, 0, 1e6, 2e7, 1e-30, 1e38], np.float32)[:, None]
    keys[8, 3], keys[9, 40], keys[10, 0] = np.nan, np.inf, -np.inf
    args = {**cache.table(), "k": keys, "v": np.ascontiguousarray(keys[::-1]),
            "positions": np.arange(12, dtype=np.int32), "slots": np.zeros(12, np.int32)}
    base = run_everywhere(kv_store(head_dim=64, kv_type=kv_type), args, 12, "base")
    stored = _read_back(Cache(cache.keys, cache.values, base, cache.pages), kv_type)[0][0, :, 0]
    meant = through_cache(keys.astype(np.float64), kv_type).astype(np.float32)
    assert_same_bits(np.abs(stored), np.abs(meant), "what is read")  # a zero's sign is lost
    if kv_type == "q8_0":
        assert np.isnan(stored[8, :32]).all() and np.isnan(stored[9, 32:]).all()
        assert np.isfinite(stored[8, 32:]).all() and np.isnan(stored[7]).all()


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
@pytest.mark.parametrize(("group", "head_dim", "window"), [(3, 64, 0), (1, 96, 20), (2, 32, 0)])
def test_other_types_attend_to_what_they_hold(
    kv_type: str, group: int, head_dim: int, window: int
) -> None:
    """The bits of an f32 cache that holds the rounded numbers, in blocks and one by one."""
    cache = Cache.filled(580, 2, head_dim, kv_type=kv_type)
    plain = Cache.filled(580, 2, head_dim, kv_type="f32")
    read = _read_back(cache, kv_type)
    args = {**plain.table(), "k": read[0], "v": read[1],
            "positions": np.tile(np.arange(580, dtype=np.int32), 2),
            "slots": np.repeat(np.arange(2, dtype=np.int32), 580)}  # fmt: skip
    store = kv_store(head_dim=head_dim, kv_type="f32")
    plain.base[:] = run(store, "host", args, 1160, ["base"])["base"]
    for slot, first, n in RUNS[1] + RUNS[2]:
        tokens = [(slot, first + i) for i in range(n)]
        case = cache.case(2 * group, tokens, head_dim**-0.5)
        wanted = _attend(plain, case | plain.table(), group, kv_type="f32", window=window)
        got = _attend(cache, case, group, kv_type=kv_type, window=window)
        assert_same_bits(got, wanted, f"{kv_type} from {first}")
        singly = _one_by_one(cache, case, group, kv_type=kv_type, window=window)
        assert_same_bits(singly, wanted, f"{kv_type} from {first}, one by one")


@pytest.mark.parametrize("kv_type", ["f32", "q8_0"])
def test_other_types_have_the_same_bits_everywhere(kv_type: str) -> None:
    cache = Cache.filled(36, 1, 32, kv_type=kv_type)
    case = cache.case(2, [(0, p) for p in (30, 31, 32, 33)] + [(1, 17)], 0.3)
    wanted = _attend(cache, case, 2, "eager", kv_type=kv_type)
    for level in levels():
        got = _attend(cache, case, 2, level, kv_type=kv_type)
        assert_same_bits(got, wanted, f"{kv_type} on {level}")


def test_odd_head_widths_are_refused() -> None:
    cache = Cache.filled(2, 1, 16)
    case = cache.case(1, [(0, 1)], 1.0)
    with pytest.raises(KernelError, match="head_dim 40"):
        run(attend(head_dim=40, group=1), "eager", case, 1, ["y"])
    with pytest.raises(KernelError, match="got head_dim 48, wanted a multiple of 32"):
        run(attend(head_dim=48, group=1, kv_type="q8_0"), "eager", case, 1, ["y"])
    with pytest.raises(KernelError, match="bf16"):
        run(attend(head_dim=16, group=1, kv_type="bf16"), "eager", case, 1, ["y"])
