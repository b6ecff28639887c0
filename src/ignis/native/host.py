"""The processor we run on, as a `Target`."""

from __future__ import annotations

import llvmlite.binding as llvm

from ignis.errors import UsageError
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


def chosen_target(level: str | None) -> Target:
    """The processor that a feature level names, or this one: what code can be made for."""
    return host_target() if level is None else Target.level(level)


def running_target(level: str | None) -> Target:
    """`chosen_target`, of which this machine can run the code; else `UsageError`."""
    target = chosen_target(level)
    if level is not None and not (host := host_target()).runs(target):
        able = [name for name in Target.levels() if host.runs(Target.level(name))]
        raise UsageError("this processor can't run that feature level", where="IGNIS_TARGET",
                         got=level, wanted=" or ".join(able),
                         hint="leave it unset to use all that there is")  # fmt: skip
    return target
