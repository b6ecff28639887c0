"""The processor we run on, as a `Target`."""

from __future__ import annotations

import llvmlite.binding as llvm

from ignis.target import Target


def host_target() -> Target:
    """LLVM's name for this machine, the features it has and those it lacks."""
    features = llvm.get_host_cpu_features()
    return Target(
        triple=llvm.get_process_triple(),
        cpu=llvm.get_host_cpu_name(),
        features=frozenset(name for name, present in features.items() if present),
        absent=frozenset(name for name, present in features.items() if not present),
    )
