"""What the docs show of the compiler, made from the compiler itself.

    python -m tests.compiler.docs        writes docs/ir.md, and the dumps inside docs/compiler.md

A test compares them with what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping

from ignis.graph.ir import OPS, Operation
from ignis.graph.ir.operation import Attribute, Operand, OptionalAttribute
from ignis.graph.ir.printer import body_lines
from ignis.graph.passes.memory_plan import lives_of
from ignis.inspect import Compilation, inspect_graph
from ignis.inspect.code import kernel_code
from ignis.inspect.layers import by_layer
from ignis.inspect.report import pass_summary
from ignis.kernels import elementwise
from ignis.runtime.profile import launch_label
from ignis.target import Target
from tests.conftest import REPOSITORY
from tests.graph.qwen_shape import QWEN2_05B, qwen2_graph

IR = REPOSITORY / "docs" / "ir.md"
COMPILER = REPOSITORY / "docs" / "compiler.md"
_DUMP = re.compile(r"(<!-- dump: ([\w -]+) -->\n```\w*\n)(.*?)(```)", re.DOTALL)
_INTRODUCTION = """\
# The graph IR

*Made from the op classes by `python -m tests.compiler.docs`; a test compares.*

A graph is a list of operations in SSA form. Activations are `%values` of type `f32[T,D]` or
`a8[T,D]` (quantized to blocks of 32), or the `experts[T,J]` that each token has chosen; T is the
number of tokens in the step, R the number of rows that need logits, so one graph serves decode,
prompts and batches. Weights are `@names` of GGUF
tensors, typed by their format. Optional operands are written with their names, attributes in
braces:

    graph(%x: f32[T,64]) {
      weights {
        @w: q8_0[64,64]
        @gain: f32[64] = 1.0          # known to be all ones
      }
      %0 = rmsnorm(%x, @gain) {eps = 1e-06} : f32[T,64]
      %1 = matmul(%0, @w, residual=%x) : f32[T,64]
      return %1
    }

`parse_graph(print_graph(g)) == g`. The rules that every graph obeys are listed at the top of
`graph/ir/verifier.py`.

Two passes add to this. `layout` writes `panels` or `rows` behind the type of a weight that is
packed when the model loads; all others are read from the mapped file. `schedule_steps` puts
`barrier` where threads meet (`if T > 1`, `if T = 1`: only in such steps), and `repeat` before what
every thread does for itself in a step of one token. An op of two stages, attention or logits with a
cap, has a line `then %result` for the second:

    graph(repeat %x: f32[T,64]) {
      weights {
        @w: q8_0[64,64] panels
      }
      repeat %0 = quantize(%x) {rows = "T"} : a8[T,64]
      barrier if T > 1
      %1 = matmul(%0, @w) : f32[T,64]
      barrier
      return %1
    }
"""


def ir_reference() -> str:
    """docs/ir.md."""
    return "\n".join([_INTRODUCTION, *(_op(op) for op in OPS.values())])


def _op(op: type[Operation]) -> str:
    text = inspect.cleandoc(op.__doc__ or "")
    lines = [f"## {op.name}", "", text, "", "| operand | | element type |", "|---|---|---|"]
    lines += [_operand(spec, op) for spec in op.operand_specs]
    if op.attribute_specs:
        lines += ["", "| attribute | |", "|---|---|"]
        lines += [_attribute(spec) for spec in op.attribute_specs]
    return "\n".join([*lines, ""])


def _operand(spec: Operand, op: type[Operation]) -> str:
    kind = "weight" if spec.weight else "activation"
    notes = [kind] + ["optional"] * spec.optional
    notes += ["the result may take its place"] * (spec.name in op.in_place)
    return f"| `{spec.name}` | {', '.join(notes)} | {', '.join(spec.dtypes)} |"


def _attribute(spec: Attribute[object]) -> str:
    optional = " (may be left out)" if isinstance(spec, OptionalAttribute) else ""
    return f"| `{spec.name}` | {spec.wanted}{optional} |"


def dumps() -> Mapping[str, Callable[[Compilation], str]]:
    """Every dump of docs/compiler.md, by its name: of the shape of Qwen2.5-0.5B."""
    made: dict[str, Callable[[Compilation], str]] = {
        "lowering": lambda c: _layer(c, None), "pipeline": _pipeline, "plans": _plans,
        "steps": _steps, "memory": _memory, "source": lambda c: _code("source"),
        "assembly": lambda c: _code("code"), "after layout": _weights,
    }  # fmt: skip
    for name in ("fuse_residual", "rope_store", "quantize_activations", "fuse_gate_up",
                 "schedule_steps"):  # fmt: skip
        made[f"after {name}"] = lambda c, name=name: _layer(c, name)  # type: ignore[misc]
    return made


def compiler_walk(text: str) -> str:
    """docs/compiler.md with its dumps made anew."""
    compilation = inspect_graph(QWEN2_05B, qwen2_graph(), "q8_0", check=True)
    known = dumps()
    return _DUMP.sub(lambda m: m[1] + known[m[2]](compilation).rstrip() + "\n" + m[4], text)


def _layer(c: Compilation, name: str | None) -> str:
    graph = c.naive
    if name is not None:
        graph = next(s.after for s in c.passes if s.report.name == name)
    lines = dict(zip(map(id, graph.operations), body_lines(graph)[1:], strict=True))
    return "\n".join(line for op in by_layer(graph)[0] for line in lines[id(op)])


def _weights(c: Compilation) -> str:
    """The matrices of the first layer, as they are declared behind the layout pass."""
    graph = next(s.after for s in c.passes if s.report.name == "layout")
    return "\n".join(f"{weight}: {weight.type}" for name, weight in graph.weights.items()
                     if name.startswith("blk.0.") and len(weight.type.shape) == 2)  # fmt: skip


def _pipeline(c: Compilation) -> str:
    lines = ["pass                   before after  what it does"]
    for snapshot in c.passes:
        r = snapshot.report
        summary = pass_summary(r.name).rstrip(".")
        lines.append(f"{r.name:<22} {r.ops_before:>6}{r.ops_after:>6}  {summary}")
    return "\n".join(lines)


def _plans(c: Compilation) -> str:
    lines = ["                 steps  launches  arena KiB  bound KiB  a thread's own KiB"]
    for t, r in ((1, 1), (16, 8), (128, 64), (512, 1)):
        plan = c.plan(t, r)
        m = plan.memory
        lines.append(f"T = {t:<3}  R = {r:<2}  {plan.timetable.n_steps:>5}{len(plan.launches):>10}"
                     f"{m.nbytes / 1024:>11.1f}{m.bound_bytes / 1024:>11.1f}"
                     f"{m.private_nbytes / 1024:>14.1f}")  # fmt: skip
    return "\n".join(lines)


def _steps(c: Compilation) -> str:
    plan = c.plan(1, 1)
    lines = ["step  launch                    work"]
    last = -1
    for launch, step, repeated in zip(
        plan.launches, plan.timetable.step, plan.timetable.repeated, strict=True
    ):
        if step == 5:
            break
        how = "every thread for itself" if repeated else "chunks of rows from a counter"
        number = str(step) if step != last else ""
        lines.append(f"{number:>4}  {launch_label(launch):<24}  {how}")
        last = step
    return "\n".join(lines)


def _memory(c: Compilation) -> str:
    memory = c.plan(1, 1).memory
    lives = lives_of(memory.graph, memory.timing.steps)
    lines = ["value                  bytes  offset  steps"]
    for value in memory.graph.values[1:]:
        first, last = lives[value]
        if first > 4:
            break
        if value in memory.timing.private or value not in memory.offsets:
            continue
        lines.append(f"{f'{value}: {value.type}':<22}{value.type.nbytes(1, 1):>6}"
                     f"{memory.offsets[value]:>8}  {first} to {last}")  # fmt: skip
    return "\n".join(lines)


def _code(part: str) -> str:
    """The kernel's source, or the loop of its assembly that works on whole vectors."""
    shown = kernel_code(elementwise.mul(), Target.level("x86-64-v3"), "asm")
    if part == "source":
        return shown.source
    blocks = re.split(r"^(?=\.LBB)", shown.code, flags=re.MULTILINE)
    return next(block for block in blocks if "vmulps" in block and "ymm" in block)


def main() -> None:
    IR.write_text(ir_reference())
    COMPILER.write_text(compiler_walk(COMPILER.read_text()))


if __name__ == "__main__":
    main()
