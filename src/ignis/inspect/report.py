"""A compilation as plain data, and as the lines that `ignis compile` prints."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ignis.graph.ir.printer import print_graph, print_operation
from ignis.graph.passes.pipeline import PIPELINE
from ignis.inspect.compilation import BUCKETS, Compilation, StepPlan

_PASSES = {step.name: step for step in PIPELINE}


def report(compilation: Compilation) -> dict[str, Any]:
    """What `ignis compile --json` prints. Sizes are bytes, times seconds."""
    c, ran = compilation.config, {s.report.name: s.report for s in compilation.passes}
    return {
        "model": {
            "source": c.source, "architecture": c.architecture, "layers": c.n_layers,
            "width": c.n_embd, "heads": c.n_heads, "kv_heads": c.n_kv_heads,
            "head_width": c.head_dim, "hidden_width": c.n_ff, "vocabulary": c.n_vocab,
        },
        "lowering": {"ops": len(compilation.naive.operations), "seconds": compilation.seconds},
        "passes": [
            {"name": r.name, "required": _PASSES[r.name].required, "ops_before": r.ops_before,
             "ops_after": r.ops_after, "seconds": r.seconds, "made": dict(r.counts)}
            for r in ran.values()
        ],
        "disabled": [step.name for step in PIPELINE if step.name not in ran]
        + ([] if compilation.reuse else ["plan_memory"]),
        "verified": compilation.verified,
        "layout": compilation.layout,
        "plans": [plan_data(compilation.plan(*bucket)) for bucket in BUCKETS],
        "kernels": list(compilation.kernels()),
    }  # fmt: skip


def plan_data(plan: StepPlan) -> dict[str, Any]:
    """The figures of one bucket of step sizes."""
    memory = plan.memory
    return {
        "n_tokens": plan.n_tokens, "n_logits": plan.n_logits,
        "steps": plan.timetable.n_steps, "barriers": plan.timetable.n_steps,
        "launches": len(plan.launches), "values": memory.n_values, "places": memory.n_buffers,
        "arena": memory.nbytes, "bound": memory.bound_bytes,
        "private": memory.private_nbytes, "private_bound": memory.private_bound_bytes,
        "gap": memory.gap_bytes,
        "without_sharing": memory.naive_nbytes, "logits": memory.output_nbytes,
        "scratch": plan.scratch_nbytes, "seconds": plan.seconds,
    }  # fmt: skip


def planned_text(plan: StepPlan) -> str:
    """The graph with the bytes of each result as a comment: still a graph to parse."""
    memory, sizes = plan.memory, (plan.n_tokens, plan.n_logits)
    lines = [
        f"# T = {plan.n_tokens}, R = {plan.n_logits}: an arena of {memory.nbytes} bytes, "
        f"{memory.bound_bytes} live at once; {memory.private_nbytes} more in each thread"
    ]
    results = {print_operation(op): op.results for op in memory.graph.operations}
    for line in print_graph(memory.graph).splitlines():
        values = results.get(line.strip().removeprefix("repeat "), ())
        if line.startswith("graph("):
            values = memory.graph.inputs
        places = []
        for value in values:
            start = memory.offsets.get(value)
            own = " of its own" if value in memory.timing.private else ""
            places.append("outside" if start is None else
                          f"bytes {start} to {start + value.type.nbytes(*sizes)}{own}")
        lines.append(f"{line}  # {', '.join(places)}" if places else line)
    return "\n".join([*lines, ""])


def pass_summary(name: str) -> str:
    """The first sentence of a pass's docstring."""
    return (inspect.getdoc(_PASSES[name].function) or "").partition("\n")[0]


def pass_doc(name: str) -> str:
    """A pass's docstring: what it rewrites, before and after in textual IR."""
    return inspect.getdoc(_PASSES[name].function) or ""


def text_lines(data: Mapping[str, Any]) -> list[str]:
    """The report for people."""
    m = data["model"]
    lines = [
        f"{m['architecture']}: {m['layers']} layers, width {m['width']}, {m['heads']} heads of "
        f"{m['head_width']} on {m['kv_heads']} key heads, hidden width {m['hidden_width']}, "
        f"vocabulary {m['vocabulary']}",
        f"lowered to {data['lowering']['ops']} ops in {1e3 * data['lowering']['seconds']:.1f} ms",
        "",
        "pass                      before   after       ms   made",
    ]
    for p in data["passes"]:
        made = ", ".join(f"{count} {kind}" for kind, count in p["made"].items()) or "-"
        lines.append(f"  {p['name']:<22}{p['ops_before']:>8}{p['ops_after']:>8}"
                     f"{1e3 * p['seconds']:>9.1f}   {made}")
    if data["disabled"]:
        lines.append(f"  switched off: {', '.join(data['disabled'])}")
    lines += [
        "" if not data["verified"] else "\nverified before and after every pass; plans too",
        f"weights {data['layout']}; {len(data['kernels'])} kernels; memory in KiB",
        "",
        "plan     T    R   steps  launches     arena     bound   private*  scratch*   logits"
        "  unshared    ms",
    ]
    lines += [_plan_line(p) for p in data["plans"]]
    decode = data["plans"][0]
    lines += [
        "  * for each thread",
        f"a decoded token costs {decode['barriers']} barriers: "
        f"{decode['barriers'] / max(m['layers'], 1):.2f} a layer",
    ]
    return [line for i, line in enumerate(lines) if line or i]


def _plan_line(p: Mapping[str, Any]) -> str:
    name = "decode" if p["n_tokens"] == 1 else "prompt"
    sizes = "".join(f"{p[key] / 1024:>{width}.1f}" for key, width in (
        ("arena", 10), ("bound", 10), ("private", 10), ("scratch", 10), ("logits", 10),
        ("without_sharing", 10)))
    why = ""
    if p["gap"]:
        why = f"  {p['gap']} bytes over the bound: gaps between values of different lives"
    return (f"{name:<6}{p['n_tokens']:>4}{p['n_logits']:>5}{p['steps']:>8}{p['launches']:>10}"
            f"{sizes}{1e3 * p['seconds']:>7.0f}{why}")
