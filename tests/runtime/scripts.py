"""Python scripts in a process of their own, for what a test process must not do to itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping


def run_script(
    source: str, env: Mapping[str, str], *arguments: object, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run `source` with `sys.argv[1:] == arguments` and collect its output."""
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)], env=dict(env), capture_output=True,
        text=True, timeout=timeout, check=False,
    )  # fmt: skip
