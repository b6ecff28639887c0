"""The thread team: barriers hold, Ctrl-C ends a step, workers come and go with their owner."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ignis.errors import UsageError
from ignis.kernels.elementwise import add
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.native.library import Library
from ignis.runtime.launches import Launch
from ignis.runtime.memory import Memory
from ignis.runtime.plan import CompiledPlan
from ignis.runtime.team import WALKER, ThreadTeam
from tests.runtime.scripts import run_script

N_ROWS, WIDTH, N_STEPS = 48, 16, 300
Array = np.ndarray


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    objects = ObjectCache(tmp_path_factory.mktemp("objects"))
    return Library([WALKER, add()], host_target(), objects)


class Ladder:
    """A plan in which every record reads what other threads wrote in the one before.

    Row r of each buffer becomes the sum of rows r and r + 1 of the other: one barrier that lets a
    thread through too early, one row done twice or not at all, and the last row is wrong.
    """

    def __init__(self, library: Library, n_threads: int, shared: bool, grain: int = 0) -> None:
        nbytes = (N_ROWS + 1) * WIDTH * 4
        self.buffers = [Memory(nbytes) for _ in range(2)]
        launches = []
        for step in range(N_STEPS):
            source, result = self.buffers[step % 2].address, self.buffers[1 - step % 2].address
            args = {"a": source, "b": source + 4 * WIDTH, "y": result, "n": WIDTH}
            launches.append(
                Launch(None, add(), args, units=1, per="T", shared=shared, grain=grain)
            )
        self.plan = CompiledPlan(launches, library, n_threads)
        self.plan.set_counts({"T": N_ROWS, "R": 1, "S": 1})

    def rows(self, index: int) -> Array:
        count = (N_ROWS + 1) * WIDTH
        return self.buffers[index].view(np.float32, count).reshape(N_ROWS + 1, WIDTH)

    def start(self) -> None:
        rng = np.random.default_rng(0)
        for index in range(2):
            self.rows(index)[:] = 0
        self.rows(0)[:N_ROWS] = rng.normal(0, 1e-20, (N_ROWS, WIDTH))

    @property
    def result(self) -> Array:
        return self.rows(N_STEPS % 2)[:N_ROWS].copy()


def climbed() -> Array:
    """What the ladder must come to: the same sums in NumPy."""
    rows = np.zeros((N_ROWS + 1, WIDTH), np.float32)
    rows[:N_ROWS] = np.random.default_rng(0).normal(0, 1e-20, (N_ROWS, WIDTH))
    for _ in range(N_STEPS):
        rows[:N_ROWS] = rows[:-1] + rows[1:]
    return rows[:N_ROWS]


@pytest.mark.parametrize(
    ("shared", "grain"), [(False, 0), (True, 0), (True, 5)],
    ids=["divided", "by chunks", "streams"],
)  # fmt: skip
@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_any_number_of_threads_computes_the_same(
    library: Library, n_threads: int, shared: bool, grain: int
) -> None:
    """More threads than processors as well: there a barrier that only spins takes seconds."""
    team = ThreadTeam(library, n_threads, 64)
    ladder = Ladder(library, n_threads, shared, grain)
    try:
        for _ in range(3):
            ladder.start()
            team.run(ladder.plan.records)
            assert np.array_equal(ladder.result, climbed())
    finally:
        team.close()


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_what_was_begun_is_done_by_the_time_of_the_next_run(
    library: Library, n_threads: int
) -> None:
    """Steps read what packing writes while Python goes on: none may begin before it is done."""
    team = ThreadTeam(library, n_threads, 64)
    begun, next_one = (Ladder(library, n_threads, shared=True) for _ in range(2))
    try:
        for finish in (team.finish, lambda: team.run(next_one.plan.records)):
            begun.start()
            team.begin(begun.plan.records)
            finish()
            assert np.array_equal(begun.result, climbed())
            team.finish()  # nothing is left to do
    finally:
        team.close()


def test_closing_breaks_off_what_was_begun(library: Library) -> None:
    """Workers in the middle of a plan must neither hold up the end nor outlive their memory."""
    before = workers()
    team = ThreadTeam(library, 3, 64)
    ladder = Ladder(library, 3, shared=True)
    team.begin(ladder.plan.records)
    team.close()
    assert workers() == before
    with pytest.raises(UsageError, match="closed"):
        team.begin(ladder.plan.records)


def test_memory_outlives_the_workers_that_write_it(library: Library) -> None:
    """Ctrl-C while weights are packed drops the engine: its memory must go after its workers."""
    before, left = workers(), []
    team, held = ThreadTeam(library, 3, 64), Ladder(library, 3, shared=True)
    weakref.finalize(held, lambda: left.append(workers() - before))
    team.begin(held.plan.records, held=held)
    del held, team
    gc.collect()
    assert left == [set()]


def workers() -> set[threading.Thread]:
    """The workers that live now; those of other teams in this process have the same names."""
    return {t for t in threading.enumerate() if t.name.removeprefix("ignis-").isdigit()}


def test_closing_stops_the_workers(library: Library) -> None:
    """Leaked workers would walk into memory that is no longer there."""
    before = workers()
    team = ThreadTeam(library, 3, 64)
    ladder = Ladder(library, 3, shared=False)
    ladder.start()
    team.run(ladder.plan.records)
    assert sorted(t.name for t in workers() - before) == ["ignis-1", "ignis-2"]
    team.close()
    team.close()
    assert workers() == before
    with pytest.raises(UsageError, match="closed"):
        team.run(ladder.plan.records)


def test_a_team_that_nobody_holds_stops_by_itself(library: Library) -> None:
    before = workers()
    team = ThreadTeam(library, 2, 64)
    ladder = Ladder(library, 2, shared=False)
    team.run(ladder.plan.records)
    del team
    assert workers() == before


def test_somebody_elses_wakeup_descriptor_stays(library: Library) -> None:
    """An event loop learns of signals through it; without it, Ctrl-C would no longer stop it."""
    team = ThreadTeam(library, 2, 64)
    ladder = Ladder(library, 2, shared=False)

    async def run_inside_a_loop() -> tuple[int, int]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
        before = _wakeup_descriptor()
        team.run(ladder.plan.records)
        return before, _wakeup_descriptor()

    try:
        team.run(ladder.plan.records)
        assert _wakeup_descriptor() == -1
        before, after = asyncio.run(run_inside_a_loop())
        assert before == after != -1
    finally:
        team.close()


def _wakeup_descriptor() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


_COMMON = """
import os, signal, sys, threading, time
import numpy as np
from pathlib import Path
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.native.library import Library
from ignis.runtime.team import WALKER, ThreadTeam
from ignis.kernels.elementwise import add
from tests.runtime.test_team import Ladder, climbed

library = Library([WALKER, add()], host_target(), ObjectCache(Path(sys.argv[1])))
n_threads = int(sys.argv[2])
team, ladder = ThreadTeam(library, n_threads, 64), Ladder(library, n_threads, False)

def check():
    ladder.start()
    team.run(ladder.plan.records)
    assert np.array_equal(ladder.result, climbed())
"""

# One call of native code that would take many seconds.
_INTERRUPTED = _COMMON + """
from ignis.runtime.launches import Launch
from ignis.runtime.memory import Memory
from ignis.runtime.plan import CompiledPlan

check()
n = 4_000_000
memory = Memory(4 * n)
args = {"a": memory.address, "b": memory.address, "y": memory.address, "n": n}
endless = CompiledPlan([Launch(None, add(), args, units=1)] * 5000, library, n_threads)
endless.set_counts({"T": 1, "R": 1, "S": 1})
sent = []
def interrupt():
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
for _ in range(2):      # and the same once more: the first left nothing behind
    threading.Timer(0.3, interrupt).start()
    try:
        team.run(endless.records)
    except KeyboardInterrupt:
        print(time.perf_counter() - sent[-1])
    check()
team.close()
"""


@pytest.fixture
def run(subprocess_env: dict[str, str], tmp_path: Path) -> Callable[..., list[str]]:
    """Run a script and return the words it printed."""

    def run_it(source: str, n_threads: int) -> list[str]:
        done = run_script(source, subprocess_env, tmp_path, n_threads)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run_it


@pytest.mark.parametrize("n_threads", [1, 3])
def test_ctrl_c_ends_one_long_native_call(
    run: Callable[..., list[str]], n_threads: int
) -> None:
    """Python cannot: its handler waits until native code returns."""
    times = run(_INTERRUPTED, n_threads)
    assert len(times) == 2 and max(map(float, times)) < 0.5


_FORKED = _COMMON + """
check()
ladder.start()
team.begin(ladder.plan.records)
child = os.fork()
if child == 0:
    ladder.start()      # the parent's workers may have been anywhere
    team.finish()
    assert np.array_equal(ladder.result, climbed())
    check()             # with workers of its own
    team.close()
    os._exit(42)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
team.finish()
assert np.array_equal(ladder.result, climbed())
check()                 # the parent's are still there
team.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_makes_workers_of_its_own(
    run: Callable[..., list[str]], subprocess_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads do not survive a fork: without new ones the child would wait for ever."""
    # Newer Pythons warn of a fork with threads, which is what this test is about.
    monkeypatch.setitem(subprocess_env, "PYTHONWARNINGS", "default")
    assert run(_FORKED, 3) == ["child", "42"]
