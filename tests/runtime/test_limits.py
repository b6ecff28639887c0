"""How many threads and how much memory: more than the container grants makes everything slow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ignis.runtime import cgroup, weights
from ignis.runtime.threads import available_threads
from ignis.runtime.weights import available_memory, choose_layout


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups in place of the system's."""
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "groups")
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "groups"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("50000 100000", 0.5), ("", None),
     ("nonsense\n", None), ("0 100000", None), ("-1 100000", None)],
)  # fmt: skip
def test_quota_of_version_2(groups: Path, text: str, quota: float | None) -> None:
    write(groups / "cpu.max", text)
    assert cgroup.cpu_quota() == quota


def test_quota_of_version_1(groups: Path) -> None:
    write(groups / "cpu/cpu.cfs_period_us", "100000\n")
    for text, quota in (("-1\n", None), ("250000\n", 2.5)):
        write(groups / "cpu/cpu.cfs_quota_us", text)
        assert cgroup.cpu_quota() == quota


def test_the_strictest_group_above_the_process_counts(groups: Path, tmp_path: Path) -> None:
    """A service's limit stands at its own group, which is not the root of the tree."""
    write(tmp_path / "membership", "0::/system.slice/our.service\n")
    write(groups / "system.slice/our.service/cpu.max", "300000 100000")
    assert cgroup.cpu_quota() == 3
    write(groups / "system.slice/cpu.max", "200000 100000")
    assert cgroup.cpu_quota() == 2
    write(tmp_path / "membership", "4:cpu,cpuacct:/a/b\n2:memory:/c\n")
    write(groups / "cpu/a/cpu.cfs_quota_us", "100000")
    write(groups / "cpu/a/cpu.cfs_period_us", "100000")
    assert cgroup.cpu_quota() == 1


def test_a_group_outside_the_tree_is_left_alone(groups: Path, tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/../../elsewhere\n")
    assert cgroup.cpu_quota() is None and cgroup.free_memory() is None


def test_threads_respect_affinity_and_quota(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert available_threads() == 6
    for text, n_threads in (("150000 100000", 2), ("20000 100000", 1), ("900000 100000", 6)):
        write(groups / "cpu.max", text)
        assert available_threads() == n_threads


def test_memory_is_what_the_group_has_left(groups: Path) -> None:
    system = available_memory()
    assert 0 < system < 1 << 62
    write(groups / "memory.max", "max\n")
    write(groups / "memory.current", "1000000\n")
    assert available_memory() > 0.5 * system
    write(groups / "memory.max", "3000000\n")
    assert available_memory() == 2_000_000
    write(groups / "memory.max", "900000\n")
    assert available_memory() == 0


def test_auto_maps_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = weights.PackedTensor("w", "q8_0", "panels", 1, 16, 32, nbytes=1000)
    for available, layout in ((2000, "packed"), (1999, "mapped"), (0, "mapped")):
        monkeypatch.setattr(weights, "available_memory", lambda n=available: n)
        assert choose_layout("auto", [tensor]) == layout
        assert choose_layout("packed", [tensor]) == "packed"
        assert choose_layout("mapped", [tensor]) == "mapped"
