"""Ignis against llama.cpp on the same files, taking turns.

    python -m bench.compare                                 the default set of models
    python -m bench.compare smollm2-q8_0 some.gguf          names of `bench.make_models`, or files
    python -m bench.compare --peer-python PATH --json out.json --svg docs/benchmarks.svg

Every engine runs in a process of its own and is stopped while another works. The order turns round
from one repetition to the next; ratios are taken within a repetition.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from bench.engines import EngineSpec, Plan, Worker, ignis_spec, llama_specs
from bench.make_models import DEFAULT_SET, ensure_model
from bench.report import Comparison, Figures, footer, markdown, tables
from ignis.errors import IgnisError
from ignis.native.host import host_target
from ignis.runtime.threads import available_threads

_CHECKED_TOKENS = 16


def compare(
    model: str, nbytes: int, specs: Sequence[EngineSpec], plan: Plan, tell: Callable[[str], None]
) -> Comparison:
    """Measure all engines on one file. Raises WorkerError."""
    with ExitStack() as stack:
        workers = []
        for spec in specs:
            tell(f"{model}: starting {spec.label}")
            workers.append(stack.enter_context(Worker(spec)))
        figures = [Figures(w.spec.label, w.spec.is_peer, w.about) for w in workers]
        agreement = _agreement(workers)
        pairs = list(zip(workers, figures, strict=True))
        for turn in range(-1, plan.n_repeats):  # turn -1 warms up and is not counted
            for worker, result in pairs if turn % 2 == 0 else reversed(pairs):
                tell(f"{model}: turn {turn + 1} of {plan.n_repeats}, {worker.spec.label}")
                reply = worker.measure(plan)
                if turn >= 0:
                    result.add(reply, plan)
    return Comparison(model, nbytes, figures, agreement)


def _agreement(workers: Sequence[Worker]) -> dict[str, float]:
    """Correlation of each engine's logits with the first one's: do they run the same model?"""
    logits = [worker.logits(_CHECKED_TOKENS) for worker in workers]
    return {
        worker.spec.label: float(np.corrcoef(logits[0], other)[0, 1])
        for worker, other in zip(workers[1:], logits[1:], strict=True)
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on, and when."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    name += f" ({host_target().arithmetic})"
    return {"processor": name, "cores": os.cpu_count(), "system": platform.platform(),
            "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip


def as_json(comparisons: Sequence[Comparison], plan: Plan) -> dict[str, Any]:
    """The whole report; `bench.chart` draws it."""
    return {"machine": machine(), "plan": asdict(plan),
            "models": [comparison.as_json(plan) for comparison in comparisons]}  # fmt: skip


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--peer-python", default=sys.executable, metavar="PATH",
              help="The interpreter that has llama-cpp-python.  [default: this one]")
@click.option("--no-peer", is_flag=True, help="Measure Ignis only.")
@click.option("--weights", "layouts", multiple=True, default=("auto",), show_default=True,
              type=click.Choice(["auto", "mapped", "packed"]), help="Layouts; may be repeated.")
@click.option("--threads", "n_threads", type=click.IntRange(1), default=available_threads())
@click.option("--prompt-tokens", "n_prompt", type=click.IntRange(1), default=512,
              show_default=True)
@click.option("-n", "n_decode", type=click.IntRange(1), default=128, show_default=True)
@click.option("--repeat", "n_repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--min-seconds", type=click.FloatRange(0), default=0.4, show_default=True,
              help="Repeat a run within a turn until so much time is full.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report.")
@click.option("--svg", "svg_path", type=click.Path(path_type=Path), help="Draw the chart.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Tables for a README.")
def main(
    models: tuple[str, ...], peer_python: str, no_peer: bool, layouts: tuple[str, ...],
    json_path: Path | None, svg_path: Path | None, as_markdown: bool, **numbers: Any,
) -> None:  # fmt: skip
    """Compare Ignis with llama.cpp on MODELs: names of bench.make_models, or GGUF files."""
    plan = Plan(**numbers)
    errors = Console(stderr=True)
    # A pipe or a file has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 140)
    comparisons: list[Comparison] = []
    try:
        with errors.status("") as status:
            for model in models or DEFAULT_SET:
                status.update(f"{model}: looking for the file")
                path = Path(model) if model.endswith(".gguf") else ensure_model(model)
                specs = [ignis_spec(path, plan, layout) for layout in layouts]
                specs += [] if no_peer else llama_specs(path, plan, peer_python)
                comparisons.append(
                    compare(model, path.stat().st_size, specs, plan, status.update))
                if json_path:  # after every model: a long run may be cut short
                    json_path.write_text(json.dumps(as_json(comparisons, plan), indent=1) + "\n")
    except (IgnisError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if as_markdown:
        print(markdown(comparisons, plan))
    else:
        console.print(*tables(comparisons, plan), sep="\n")
    where = machine()
    print(f"\n{where['processor']}, {where['cores']} cores, {where['date']}; {footer(comparisons)}")
    if svg_path:
        from bench.chart import draw

        draw(as_json(comparisons, plan), svg_path)


if __name__ == "__main__":
    main()
