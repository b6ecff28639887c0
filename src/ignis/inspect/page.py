"""One self-contained web page of a compilation: no network, no library, works from a file.

`page_data` gathers what the page shows; `page.html` beside this file draws it. What comes from a
model reaches the page as JSON and is only ever set as text, never as markup.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ignis.errors import UsageError
from ignis.gguf.atomic import check_replaceable, followed, written_whole
from ignis.graph.ir import Value
from ignis.graph.passes.memory_plan import Timing, lives_of, replaceable
from ignis.inspect.code import kernel_code
from ignis.inspect.compilation import Compilation, StepPlan
from ignis.inspect.layers import layers_of
from ignis.inspect.report import plan_data, report
from ignis.inspect.stages import SHOWN_LAYER, Lines, stages_data
from ignis.runtime.launches import Launch
from ignis.runtime.profile import launch_label, launch_work
from ignis.runtime.work import StepSize
from ignis.target import Target

# Plans that are shown, each with the step that its work is counted for: the last is a whole prompt.
_PLANS = ((1, StepSize(1, 512)), (128, StepSize(128)), (512, StepSize(512)))
_DATA_MARK = '"the data goes here"'


def write_page(
    compilation: Compilation, path: Path, target: Target, profile: Mapping[str, Any] | None = None
) -> None:
    """Write the page; it appears when it is complete.

    Raises UsageError where the file can't be written, or is another one than a page.
    """
    template = files("ignis.inspect").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(compilation, target, profile), separators=(",", ":"))
    # No "<" survives, so nothing in a model's names can end the script element.
    page = template.replace(_DATA_MARK, data.replace("<", "\\u003c"))
    try:
        whole = followed(path)
        check_replaceable(whole, page[:15].encode(), "a page")
        if whole.exists() and not whole.is_file():      # a terminal or a pipe
            whole.write_text(page, encoding="utf-8")
            return
        with written_whole(whole) as file:
            file.write(page.encode())
    except OSError as error:
        raise UsageError(f"cannot write it: {error.strerror}", where=path) from None


def page_data(
    compilation: Compilation, target: Target, profile: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All that the page shows, as JSON values. Sizes are bytes, times seconds."""
    lines = Lines()
    stages = stages_data(compilation, lines)
    plans = [_plan(compilation.plan(t, 1), *_profiled(size, profile)) for t, size in _PLANS]
    codes = [kernel_code(kernel, target, "asm") for kernel in compilation.kernels().values()]
    return {
        "report": report(compilation),
        "lines": lines.texts,
        "stages": stages,
        "shown_layer": SHOWN_LAYER,
        "plans": plans,
        "cpu": target.cpu,
        "code": [{"symbol": c.symbol, "file": c.file, "line": c.line, "source": c.source,
                  "code": c.code} for c in codes],
        "profile": profile,
    }  # fmt: skip


def _profiled(
    size: StepSize, profile: Mapping[str, Any] | None
) -> tuple[StepSize, Mapping[str, Any] | None]:
    """The step that was profiled in place of that one, and its phase of the profile."""
    for phase in () if profile is None else profile["phases"]:
        if phase["name"] == {1: "decode", 512: "prefill"}.get(size.n_tokens):
            return StepSize(phase["n_tokens"], phase["n_past"]), phase
    return size, None


def _plan(plan: StepPlan, size: StepSize, phase: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures of a plan, its steps and the rectangles of its memory."""
    steps = _steps(plan, size)
    if phase is not None:
        launches = [launch for step in steps for launch in step["launches"]]
        for launch, times in zip(launches, phase["launches"], strict=True):
            launch |= times
    return {
        **plan_data(plan), "size": [size.n_tokens, size.n_past], "timed": phase is not None,
        "step_list": steps,
        "shared": _rectangles(plan, is_private=False),
        "own": _rectangles(plan, is_private=True),
    }  # fmt: skip


def _steps(plan: StepPlan, size: StepSize) -> list[dict[str, Any]]:
    """Each step: its layer, and its launches with their work."""
    graph = plan.memory.graph
    layer_of = dict(zip(map(id, graph.operations), layers_of(graph), strict=True))
    steps: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(plan.timetable.step):
        steps[step].append(index)
    found = []
    for members in steps.values():
        launches = [plan.launches[i] for i in members]
        # A step may begin with the end of the layer before; what it is for stands at its end.
        layer = next((layer_of[id(x.op)] for x in reversed(launches) if x.op is not None), 0)
        repeated = [plan.timetable.repeated[i] for i in members]
        shown = [_launch(*pair, size) for pair in zip(launches, repeated, strict=True)]
        found.append({"layer": layer, "launches": shown})
    return found


def _launch(launch: Launch, repeated: bool, size: StepSize) -> dict[str, Any]:
    work = launch_work(launch, size)
    if repeated:
        how = "every thread for itself"
    elif launch.is_whole:
        how = "one thread"
    else:
        how = "chunks from a counter" if launch.shared else "divided by token"
    return {"label": launch_label(launch), "kernel": launch.kernel.symbol, "how": how,
            "nbytes": work.nbytes, "int8": work.int8_macs, "f32": work.f32_macs}  # fmt: skip


def _rectangles(plan: StepPlan, *, is_private: bool) -> dict[str, Any]:
    """Values in the arena, or in a thread's own memory: time against offset."""
    memory = plan.memory
    graph = memory.graph
    steps = Timing.sequential(graph).steps if is_private else memory.timing.steps
    lives = lives_of(graph, steps)
    readers: dict[Value, list[str]] = defaultdict(list)
    for op in graph.operations:
        for value in dict.fromkeys(op.operands):
            readers[value].append(op.kind)
    values: list[dict[str, Any]] = []
    chains = _in_place_chains(plan)
    for value, offset in memory.offsets.items():
        if (value in memory.timing.private) != is_private:
            continue
        first, last = lives[value]
        producer = graph.producers.get(value)
        values.append({
            "name": str(value), "type": str(value.type), "offset": offset,
            "nbytes": value.type.nbytes(plan.n_tokens, plan.n_logits),
            "first": max(first, 0), "last": last,
            "by": "embed" if producer is None else producer.kind,
            "to": _shortened(readers[value]), "chain": chains[value].name,
        })  # fmt: skip
    n_times = max((last for _, last in steps), default=0) + 1
    nbytes = memory.private_nbytes if is_private else memory.nbytes
    return {"n_times": n_times, "nbytes": nbytes, "values": values}


def _in_place_chains(plan: StepPlan) -> dict[Value, Value]:
    """For each value the first of those that it was computed in place of, one after the other."""
    offsets, private = plan.memory.offsets, plan.memory.timing.private
    first = {value: value for value in plan.memory.graph.values}
    for op in plan.memory.graph.operations:
        for old in replaceable(op):
            new = op.results[0]
            same_arena = (old in private) == (new in private)
            if same_arena and old in offsets and offsets.get(new) == offsets[old]:
                first[new] = first[old]
    return first


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "nobody"
