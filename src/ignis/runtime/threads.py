"""How many threads this process may use: affinity and the cgroup's quota, not the core count."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_threads() -> int:
    """The processors we may run on, no more than the cgroup pays for (rounded up), at least one."""
    if hasattr(os, "sched_getaffinity"):
        n = len(os.sched_getaffinity(0))
    else:
        n = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, n if quota is None else min(n, -int(-quota // 1)))


def _cgroup_quota() -> float | None:
    """Processors' worth of time that the cgroup (v2, then v1) grants, if it is limited."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        v1_quota = int((_CGROUP / "cpu/cpu.cfs_quota_us").read_text())
        v1_period = int((_CGROUP / "cpu/cpu.cfs_period_us").read_text())
        return v1_quota / v1_period if v1_quota > 0 and v1_period > 0 else None
    except (OSError, ValueError):
        return None
