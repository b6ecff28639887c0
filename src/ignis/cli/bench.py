"""`ignis bench`: measure the engines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ignis.cli.options import (
    ENGINES,
    json_option,
    kv_type_option,
    model_option,
    quiet_option,
    tell,
    threads_option,
    weights_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ignis.bench import EngineResult
    from ignis.runtime.ceilings import Ceilings


@click.command(short_help="measure the engines")
@model_option()
@click.option("-n", "n_decode", type=click.IntRange(1), default=128, show_default=True,
              metavar="N", help="Tokens to decode.")
@click.option("--prompt-tokens", "n_prompt", type=click.IntRange(1), default=512,
              show_default=True, metavar="N", help="Tokens of the prompt.")
@click.option("--repeat", "n_repeat", type=click.IntRange(1), default=5, show_default=True,
              metavar="R", help="Repetitions; the median is reported.")
@threads_option
@click.option("--engine", "engines", default="graph,imperative", show_default=True,
              metavar="E,...", help="Engines to compare, in alternating order.")
@weights_option
@kv_type_option
@json_option
@quiet_option
def bench(
    model: str | None, n_decode: int, n_prompt: int, n_repeat: int, threads: int | None,
    engines: str, weights: str, kv_type: str, as_json: bool, quiet: bool,
) -> None:
    """Compare engines on MODEL: prefill and decode, in tokens per second."""
    names = tuple(dict.fromkeys(name.strip() for name in engines.split(",")))
    if unknown := [name for name in names if name not in ENGINES]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(ENGINES)}",
                                 param_hint="--engine")
    from ignis import bench as measuring
    from ignis import hub
    from ignis.cli.interrupt import prompt_interrupt
    from ignis.cli.progress import TerminalProgress
    from ignis.runtime.ceilings import measure
    from ignis.settings import Settings

    path = hub.resolve(model, Settings.from_env(), TerminalProgress(quiet, mention_present=False))
    options = measuring.BenchOptions(names, n_prompt, n_decode, n_repeat, threads, weights,
                                     kv_type)
    with prompt_interrupt():
        tell("measuring the machine's ceilings ...", quiet)
        ceilings = measure(threads)
        tell(f"measuring {', '.join(names)} ...", quiet)
        results = measuring.run_bench(path, options, ceilings)
    if as_json:
        click.echo(json.dumps({"model": str(path), **measuring.as_json(results, ceilings)}))
    else:
        click.echo("\n".join(table(results, ceilings)))


def table(results: Sequence[EngineResult], ceilings: Ceilings) -> list[str]:
    """The figures for people; rates as median (smallest to largest)."""
    rows = [("", *(r.engine for r in results))]
    for name in ("prefill", "decode"):
        cells = []
        for result in results:
            spread = result.prefill if name == "prefill" else result.decode
            cells.append(f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})")
        n_tokens = results[0].n_prompt if name == "prefill" else results[0].n_decode
        rows.append((f"{name} {n_tokens}, tok/s", *cells))
    rows += [
        ("compile, s", *(f"{r.compile_s:.3f}" for r in results)),
        ("first token, s", *(f"{r.first_token_s:.3f}" for r in results)),
        ("arena, KiB", *(f"{r.arena_bytes / 1024:.1f}" for r in results)),
        ("peak memory, MiB", *(f"{r.peak_memory_bytes / 2**20:.0f}" for r in results)),
        ("of bandwidth", *(_percent(r.bandwidth_share) for r in results)),
        ("of arithmetic", *(_percent(r.arithmetic_share) for r in results)),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]),
                        *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:],
                                                                   strict=True))]).rstrip()
             for row in rows]
    lines.append(f"ceilings: {ceilings.bandwidth_gb_s:.1f} GB/s, "
                 f"{ceilings.int8_gmac_s:.1f} int8 GMAC/s, {ceilings.f32_gmac_s:.1f} f32 GMAC/s")
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
