"""What is known of the processor: a wrong answer is an illegal instruction in a user's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ignis.errors import UsageError
from ignis.native.host import chosen_target, host_target, running_target
from ignis.target import Target


@pytest.mark.parametrize(
    ("target", "name"),
    [(Target.level("x86-64-v2"), "SSE"), (Target.level("x86-64-v3"), "AVX2"),
     (Target.level("x86-64-v4"), "AVX-512"), (Target.level("aarch64"), "NEON"),
     (Target.level("x86-64-v3")._replace(features=Target.level("x86-64-v3").features
                                             | {"avxvnni"}), "AVX-VNNI")],
)  # fmt: skip
def test_reports_name_what_decides_the_speed(target: Target, name: str) -> None:
    assert target.arithmetic == name


def test_whose_processor_it_is() -> None:
    """Intel's processors, by name; a level is a promise of instructions, not of a maker."""
    v3 = Target.level("x86-64-v3")
    names = ("sapphirerapids", "icelake-server", "alderlake", "znver4", "znver5")
    assert [v3._replace(cpu=name).is_intel for name in names] == [True] * 3 + [False] * 2
    assert not any(Target.level(name).is_intel for name in Target.levels())


def test_the_host_says_what_it_lacks() -> None:
    host = host_target()
    assert host.features and host.absent and not host.features & host.absent
    assert all(f"-{name}" in host.feature_string.split(",") for name in host.absent)


def test_a_level_that_this_machine_lacks_is_refused() -> None:
    host = host_target()
    for level in Target.levels():
        if host.runs(Target.level(level)):
            assert running_target(level) == Target.level(level)
            continue
        assert chosen_target(level) == Target.level(level)  # its code can be shown all the same
        with pytest.raises(UsageError, match=f"IGNIS_TARGET.*can't run.*{level}"):
            running_target(level)
    assert running_target(None) == chosen_target(None) == host


def test_the_command_line_refuses_it_in_one_line() -> None:
    level = "aarch64" if host_target().is_x86 else "x86-64-v2"
    result = subprocess.run(
        [sys.executable, "-c", "from ignis.text.words import _library; _library('bpe')"],
        env=os.environ | {"IGNIS_TARGET": level}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "UsageError: IGNIS_TARGET: this processor can't run" in result.stderr
