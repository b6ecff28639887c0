"""The docs against the compiler: dumps are made anew, worked examples followed to the letter.

What would be broken: a page that shows what no longer is, or tells steps that lead nowhere now.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from tests.compiler import docs
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "docs"
_STEP = re.compile(r"<!-- (new|in|run)(?: (.*?))? -->\n```\w*\n(.*?)```\n", re.DOTALL)
_PLACE = re.compile(r"(\S+), (behind|before|replace): (.*)", re.DOTALL)
_LLVM_OF_THE_PAGE = 22  # assembly differs from version to version


def test_the_ir_reference() -> None:
    assert docs.IR.read_text() == docs.ir_reference(), "run python -m tests.compiler.docs"


def test_the_walk_through_the_compiler() -> None:
    shown = docs.COMPILER.read_text()
    made = docs.compiler_walk(shown)
    if llvm.llvm_version_info[0] != _LLVM_OF_THE_PAGE:
        cut = "<!-- dump: assembly -->"
        shown, made = shown[: shown.index(cut)], made[: made.index(cut)]
    assert shown == made, "run python -m tests.compiler.docs"
    assert set(re.findall(r"<!-- dump: ([\w -]+) -->", shown)) >= set(docs.dumps()) - {"assembly"}


@pytest.mark.parametrize("name", ["adding-an-op", "adding-a-model", "adding-a-format"])
def test_worked_examples_work(name: str, tmp_path: Path) -> None:
    """Copy the sources, do what the page says, run what it runs."""
    for part in ("src", "tests", "bench"):
        shutil.copytree(REPOSITORY / part, tmp_path / part,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    outputs = []
    for kind, where, text in _STEP.findall((FOLDER / f"{name}.md").read_text()):
        if kind == "new":
            (tmp_path / where).write_text(text)
        elif kind == "in":
            _insert(tmp_path, where, text)
        else:
            outputs.append(_run(text, tmp_path))
    assert outputs and outputs[-1].endswith(" runs\n")


def _insert(root: Path, where: str, text: str) -> None:
    """Put the text behind, before or in place of the one line that equals the named one."""
    match = _PLACE.fullmatch(where)
    assert match is not None, where
    path, side, line = root / match[1], match[2], match[3] + "\n"
    lines = path.read_text().splitlines(keepends=True)
    assert lines.count(line) == 1, f"{match[1]} has {lines.count(line)} lines {line!r}"
    at = lines.index(line)
    end = at + (side != "before")
    path.write_text("".join([*lines[: end - (side == "replace")], text, *lines[end:]]))


def _run(script: str, root: Path) -> str:
    """Run a script on the copy; its output."""
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment,
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
