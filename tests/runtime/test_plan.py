"""Records and argument words: what native code believes without a question."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ignis.kernels.elementwise import add
from ignis.kernels.lang import ptr
from ignis.kernels.norm import rmsnorm
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.native.library import Library
from ignis.runtime.launches import Launch, Private
from ignis.runtime.plan import CompiledPlan
from ignis.runtime.schedule import Timetable

KERNEL, ARGS, UNITS, CHUNK, COUNTER, STRIDE, REPEATED, BARRIER, OWN = range(9)
COUNTS = {"T": 1, "R": 1, "S": 1}


@pytest.fixture(scope="module")
def library() -> Library:
    return Library([add(), rmsnorm()], host_target(), ObjectCache(None))


def launch(**options: object) -> Launch:
    args = {"a": 11, "b": 12, "y": 13, "n": 14}
    return Launch(None, add(), args | options.pop("args", {}), **{"units": 1, **options})


def words(plan: CompiledPlan, index: int, thread: int = 0) -> list[int]:
    record = plan.records[index]
    start = (int(record[ARGS]) - plan._words.ctypes.data) // 8 + thread * int(record[STRIDE]) // 8
    return plan._words[start : start + len(plan.launches[index].kernel.params)].tolist()


def test_a_record_names_its_kernel_and_words(library: Library) -> None:
    plan = CompiledPlan([launch(), launch(args={"b": None})], library, 2)
    assert plan.records[:, KERNEL].tolist() == [library.address(add())] * 2
    assert words(plan, 0) == [11, 12, 13, 14] and words(plan, 1) == [11, 0, 13, 14]
    assert plan.records[:, BARRIER].tolist() == [1, 1]  # without a timetable: everywhere


def test_numbers_are_the_bits_of_an_f32(library: Library) -> None:
    args = {"x": 1, "gain": 2, "y": 3, "n": 4, "n_groups": 1, "eps": 1e-5}
    plan = CompiledPlan([Launch(None, rmsnorm(), args, units=1)], library, 1)
    at = [name for name, _ in rmsnorm().params].index("eps")
    assert words(plan, 0)[at] == int(np.float32(1e-5).view(np.int32))


def test_counts_are_written_into_units_and_words(library: Library) -> None:
    launches = [
        launch(units=3),
        launch(units=3, per="T"),
        launch(units=3, per="R"),
        launch(units=300, gate="R", shared=True),
        launch(args={"n": "S"}),
    ]
    plan = CompiledPlan(launches, library, 2)
    plan.set_counts(COUNTS | {"T": 5, "R": 2, "S": 9})
    assert plan.records[:, UNITS].tolist() == [3, 15, 6, 300, 1]
    assert plan.records[:, CHUNK].tolist() == [0, 0, 0, 300 // 16, 0]
    assert words(plan, 4)[3] == 9
    plan.set_counts(COUNTS | {"T": 1, "R": 0, "S": 0})
    assert plan.records[:, UNITS].tolist() == [3, 3, 0, 0, 1]
    assert plan.records[3, CHUNK] == 1  # never a chunk of nothing
    assert words(plan, 4)[3] == 0


@pytest.mark.parametrize(("units", "own", "chunk"), [(300, 131, 11), (16, 7, 8), (2, 0, 1)])
def test_a_stream_is_mostly_divided_beforehand(
    library: Library, units: int, own: int, chunk: int
) -> None:
    """Threads that take turns on neighbouring chunks read memory at half the speed."""
    plan = CompiledPlan([launch(units=units, shared=True, grain=11)], library, 2)
    plan.set_counts(COUNTS)
    assert (plan.records[0, OWN], plan.records[0, CHUNK]) == (own, chunk)
    assert plan.records[0, UNITS] == units


def test_what_is_released_at_its_end_is_handed_out_in_chunks(library: Library) -> None:
    """Workers that begin to pack would leave a caller's own part, and drop its pages unread."""
    plan = CompiledPlan([launch(units=64, shared=True, release=(4096, 8192))], library, 2)
    plan.set_counts(COUNTS)
    assert (plan.records[0, OWN], plan.records[0, CHUNK]) == (0, 4)


def test_a_plan_may_have_nothing_to_do(library: Library) -> None:
    """A graph whose output is its input, once a gain of ones is folded away."""
    plan = CompiledPlan([], library, 2)
    plan.set_counts(COUNTS | {"T": 5})
    assert plan.records.shape[0] == 0


def test_private_arguments_differ_by_thread(library: Library) -> None:
    """Threads that shared a word would write into each other's rows."""
    launches = [launch(args={"y": Private(64)}), launch()]
    plan = CompiledPlan(
        launches, library, 3, Timetable((True, False), (0, 0)), private=1 << 20, stride=4096
    )
    assert [words(plan, 0, thread) for thread in range(3)] == [
        [11, 12, (1 << 20) + thread * 4096 + 64, 14] for thread in range(3)
    ]
    assert plan.records[:, STRIDE].tolist() == [8 * 4, 0]
    assert plan.records[:, REPEATED].tolist() == [1, 0]
    assert plan.records[:, BARRIER].tolist() == [0, 1]


def test_no_pointer_of_a_real_plan_is_null_by_accident(tmp_path: Path) -> None:
    """Only bias and residual may be absent."""
    from tests.random_models import write_random_model
    from tests.runtime.engines import engine, feed

    path = write_random_model(tmp_path / "m.gguf", architecture="qwen2", n_layers=1)
    with engine(path, tmp_path, n_threads=2, weights="mapped") as runner:
        feed(runner, [1, 2, 3])
        for bucket in runner._buckets.values():
            for index, each in enumerate(bucket.launches):
                for (name, type_), word in zip(
                    each.kernel.params, words(bucket.plan, index), strict=True
                ):
                    optional = name in ("bias", "residual")
                    assert type_ != ptr or word or optional, (each.kernel.name, name)
