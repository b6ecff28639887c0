"""Whether a file will run on this machine, what stands in the way, and what it will take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ignis.compile import configure
from ignis.errors import IgnisError, UnsupportedModelError, UsageError
from ignis.gguf import GGUFFile
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.inspect.compilation import inspect_model
from ignis.inspect.memory import (
    CHAT_NBYTES,
    COMPILING_NBYTES,
    MemoryNeeds,
    memory_needs,
)
from ignis.runtime.weights import available_memory
from ignis.text import Tokenizer


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What memory depends on, besides the file. `weights`: auto, mapped or packed."""

    n_threads: int
    n_ctx: int | None = None
    weights: str = "auto"
    kv_type: str = DEFAULT_KV_TYPE


@dataclass(frozen=True, slots=True)
class Outlook:
    """`problems` are errors as a run would raise them; `remarks` do not keep it from running.

    Without a plan there are no `needs`. `free_nbytes` is what the system and the cgroup leave.
    """

    problems: tuple[IgnisError, ...]
    remarks: tuple[str, ...]
    n_ctx: int | None
    layout: str | None
    needs: MemoryNeeds | None
    free_nbytes: int


def outlook(file: GGUFFile, options: RunOptions) -> Outlook:
    """Look at everything that a run would check, without running or compiling."""
    problems: list[IgnisError] = []
    free = available_memory()
    plan: _Plan | None = None
    try:
        plan = _plan(file, options)
        if plan.needs.own > free:
            problems.append(_too_large(plan, free, file))
    except IgnisError as error:
        problems.append(error)
    try:
        Tokenizer.from_gguf(file)
    except IgnisError as error:
        problems.append(error)
    if plan is None:
        return Outlook(tuple(problems), (), None, None, None, free)
    remarks = tuple(_remarks(plan.needs, free))
    return Outlook(tuple(problems), remarks, plan.n_ctx, plan.layout, plan.needs, free)


@dataclass(frozen=True, slots=True)
class _Plan:
    n_ctx: int
    layout: str
    needs: MemoryNeeds


def _plan(file: GGUFFile, options: RunOptions) -> _Plan:
    if not file.tensors:
        raise UnsupportedModelError(
            "the file holds a vocabulary and no weights", where=file.path,
            hint="`ignis tokenize` can use it",
        )  # fmt: skip
    _, n_ctx = configure(file, options.n_ctx, options.kv_type)
    compilation = inspect_model(
        file, weights=options.weights, n_ctx=n_ctx, kv_type=options.kv_type
    )
    needs = memory_needs(file, compilation, n_ctx, options.n_threads)
    return _Plan(n_ctx, compilation.layout, needs)


def _too_large(plan: _Plan, free: int, file: GGUFFile) -> UsageError:
    smaller = ["--weights mapped"] if plan.layout == "packed" else []
    return UsageError(
        "a run needs more memory than is free", where=file.path, got=f"{_mib(free)} free",
        wanted=f"{_mib(plan.needs.own)}, without what stays in the file",
        hint=f"try {' or '.join([*smaller, 'a smaller --ctx', '--kv-type q8_0'])}",
    )  # fmt: skip


def _remarks(needs: MemoryNeeds, free: int) -> Iterator[str]:
    if needs.own <= free < needs.total:
        yield (f"weights do not fit beside the rest: {_mib(needs.total)} of {_mib(free)}; they "
               "will be read from the disk over and over, which is slow")
    yield (f"a first run takes up to {_mib(COMPILING_NBYTES)} more, while kernels are compiled; a "
           f"chat {_mib(CHAT_NBYTES)}, for the process that renders its template")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
