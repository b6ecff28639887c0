"""Progress on stderr: a bar on a terminal, a line or two elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ignis.cli.options import tell

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from ignis.perplexity import Estimate


class TerminalProgress:
    """Implements `ignis.hub.Progress`. `mention_present`: say so if there is nothing to fetch."""

    def __init__(self, quiet: bool = False, mention_present: bool = True) -> None:
        self._quiet, self._mention_present = quiet, mention_present
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._last = ""

    def already_there(self, path: Path) -> None:
        if self._mention_present:
            tell(f"already there: {path}", self._quiet)

    def waiting(self, what: str) -> None:
        tell(f"waiting: {what}", self._quiet)

    def begin(self, what: str, total: int | None) -> None:
        if self._quiet:
            return
        if not sys.stderr.isatty():
            if what != self._last:
                tell(what + (f" ({total / 2**20:.1f} MiB)" if total else ""))
            self._last = what
            return
        self._bar = _make_bar()
        self._task = self._bar.add_task(what, total=total)
        self._bar.start()

    def advance_to(self, done: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def finished(self, path: Path) -> None:
        tell(f"saved {path}", self._quiet)


class WindowProgress:
    """The windows of a text, with the perplexity so far."""

    def __init__(self, n_ctx: int, quiet: bool = False) -> None:
        self._n_ctx, self._quiet = n_ctx, quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _make_window_bar()
            self._task = self._bar.add_task("perplexity", total=None)
            self._bar.start()
        elif not self._quiet:
            tell(f"scoring in windows of {self._n_ctx} tokens ...")
        return self

    def advance(self, done: int, total: int, so_far: Estimate) -> None:
        """Called after each window."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total,
                             description=f"perplexity {so_far}")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _make_window_bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(TextColumn("{task.description}", markup=False), BarColumn(),
                    MofNCompleteColumn(), TextColumn("windows"), TimeRemainingColumn(),
                    console=Console(stderr=True), transient=True)


def _make_bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(TextColumn("{task.description}", markup=False), BarColumn(),
                    DownloadColumn(binary_units=True), TransferSpeedColumn(),
                    TimeRemainingColumn(), console=Console(stderr=True), transient=True)
