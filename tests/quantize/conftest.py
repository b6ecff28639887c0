"""Quantizing in this process, and a look at what is left in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ignis.gguf import open_gguf
from ignis.hub.progress import Progress
from ignis.quantize.convert import Options, Report, quantize
from ignis.quantize.source import GGUFSource

Convert = Callable[..., Report]


@pytest.fixture
def convert() -> Convert:
    """Quantize one file to another; options as in `Options`."""

    def run(source: Path, target: Path, file_type: str, progress: Progress | None = None,
            **options: object) -> Report:
        with open_gguf(source) as file, GGUFSource(file) as opened:
            return quantize(opened, target, Options(type=file_type, **options), progress)

    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
