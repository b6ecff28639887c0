"""What the system's control groups grant this process: version 2, then 1.

A limit may stand at the process's own group or at any group above it, so all of them are read.
Inside a container the root of the tree is the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")  # lines `0::/a/b` (version 2), `4:cpu,cpuacct:/a` (1)


def cpu_quota() -> float | None:
    """Processors' worth of time, if that is limited."""
    version_2 = [_words(folder / "cpu.max") for folder in _folders("")]
    version_1 = [
        _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        for folder in _folders("cpu")
    ]
    quotas = map(_ratio, version_2 + version_1)
    return min((quota for quota in quotas if quota is not None), default=None)


def free_memory() -> int | None:
    """Bytes that may still be taken, if that is limited."""
    free = []
    for folders, limit, used in (
        (_folders(""), "memory.max", "memory.current"),
        (_folders("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in folders:
            numbers = [_words(folder / name) for name in (limit, used)]
            if all(len(words) == 1 and words[0].isdigit() for words in numbers):
                free.append(int(numbers[0][0]) - int(numbers[1][0]))
    return max(min(free), 0) if free else None


def _folders(controller: str) -> Iterator[Path]:
    """The process's group and those above it; `controller` is empty for version 2."""
    tree = _ROOT / controller
    yield tree
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(path.lstrip("/"))
            if ".." not in group.parts:  # a group outside our view of the tree
                yield from (tree / g for g in (group, *group.parents) if g != Path())


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except (OSError, ValueError):
        return []


def _ratio(words: list[str]) -> float | None:
    """quota / period, where both are there and mean a limit ("max" and -1 do not)."""
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])
