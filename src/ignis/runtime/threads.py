"""How many threads this process may use: affinity and the cgroup's quota, not the core count."""

from __future__ import annotations

import math
import os

from ignis.runtime.cgroup import cpu_quota


def available_threads() -> int:
    """The processors we may run on, no more than the cgroup pays for (rounded up), at least one."""
    if hasattr(os, "sched_getaffinity"):
        n = len(os.sched_getaffinity(0))
    else:
        n = os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, n if quota is None else min(n, math.ceil(quota)))
