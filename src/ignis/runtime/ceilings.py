"""The machine's ceilings, measured by kernels emitted like all others, on a given thread count."""

from __future__ import annotations

import statistics
import time
from dataclasses import astuple, dataclass

import numpy as np

from ignis.kernels import ceilings as kernels
from ignis.kernels.lang import KernelFamily
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.native.library import Library
from ignis.runtime.launches import Launch
from ignis.runtime.memory import Memory
from ignis.runtime.plan import ONE_ROW, CompiledPlan
from ignis.runtime.team import WALKER, ThreadTeam
from ignis.runtime.threads import available_threads
from ignis.settings import Settings

_STREAM_UNITS = 4096  # 256 MiB, more than any cache
_MAC_UNITS = 256
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Read bandwidth in GB/s; multiply-adds of bytes and of f32 in G/s."""

    bandwidth_gb_s: float
    int8_gmac_s: float
    f32_gmac_s: float


def higher(one: Ceilings, other: Ceilings) -> Ceilings:
    """What else runs on the machine only lowers what is measured: the higher of each."""
    return Ceilings(*map(max, astuple(one), astuple(other)))


def measure(n_threads: int | None = None) -> Ceilings:
    """Measure all three, the median of a few runs each; takes about half a second.

    `n_threads`: default what affinity and the cgroup quota allow.
    """
    n_threads = n_threads or available_threads()
    families = (kernels.read_stream, kernels.chain_dot4, kernels.chain_fma)
    parts = [family() for family in families]
    cache = ObjectCache(Settings.from_env().objects_dir)
    library = Library([WALKER, *parts], host_target(), cache)
    team = ThreadTeam(library, n_threads, kernels.SCRATCH_NBYTES)
    memory = Memory(_STREAM_UNITS * kernels.STREAM_UNIT_NBYTES, huge=True)
    memory.bytes[:] = 1  # or every page is the system's one page of zeros
    memory.view(np.float32, 32)[:] = 0.5

    def seconds_of(family: KernelFamily, units: int) -> float:
        launch = Launch(None, family(), {"x": memory.address, "y": None}, units)
        plan = CompiledPlan([launch], library, n_threads)
        plan.set_counts(ONE_ROW)
        times = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            team.run(plan.records)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    try:
        stream = seconds_of(kernels.read_stream, _STREAM_UNITS)
        dot4 = seconds_of(kernels.chain_dot4, _MAC_UNITS)
        fma = seconds_of(kernels.chain_fma, _MAC_UNITS)
    finally:
        team.close()
    return Ceilings(
        memory.nbytes / stream / 1e9,
        _MAC_UNITS * kernels.DOT4_MACS / dot4 / 1e9,
        _MAC_UNITS * kernels.FMA_MACS / fma / 1e9,
    )
