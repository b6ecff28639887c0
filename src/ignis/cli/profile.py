"""`ignis profile`: where the time of a step goes, against the machine's ceilings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ignis.cli.options import (
    json_option,
    kv_type_option,
    model_option,
    quiet_option,
    tell,
    threads_option,
    weights_option,
)

if TYPE_CHECKING:
    from ignis.runtime import work as counting
    from ignis.runtime.profile import PhaseProfile
    from ignis.runtime.work import Work

_NS = 1e9


@click.command(short_help="where the time of a step goes")
@model_option()
@click.option("--tokens", "n_tokens", type=click.IntRange(1, 512), default=512,
              show_default=True, metavar="N",
              help="Tokens of the prompt, and of the context that decoding sees.")
@click.option("--repeat", "n_runs", type=click.IntRange(1), default=5, show_default=True,
              metavar="R", help="Runs of the prompt; decode steps are run 16 times as often.")
@threads_option
@weights_option
@kv_type_option
@json_option
@quiet_option
def profile(
    model: str | None, n_tokens: int, n_runs: int, threads: int | None, weights: str, kv_type: str,
    as_json: bool, quiet: bool,
) -> None:
    """Time every compiled step of MODEL natively, for a prompt and for decoding."""
    import ignis
    from ignis import hub
    from ignis.cli.interrupt import prompt_interrupt
    from ignis.cli.progress import TerminalProgress
    from ignis.runtime.ceilings import higher, measure
    from ignis.runtime.engine import NativeEngine
    from ignis.runtime.profile import profile_engine
    from ignis.settings import Settings

    path = hub.resolve(model, Settings.from_env(), TerminalProgress(quiet, mention_present=False))
    with prompt_interrupt(), ignis.load(path, threads=threads, weights=weights,
                                        kv_type=kv_type) as loaded:
        engine = loaded.engine
        assert isinstance(engine, NativeEngine)
        n_threads, layout = engine.options.n_threads, engine.weights.layout
        tell("measuring the machine's ceilings, then the steps ...", quiet)
        before = measure(n_threads)
        phases = profile_engine(engine, n_tokens, n_runs, 16 * n_runs)
        ceilings = higher(before, measure(n_threads))
    if as_json:
        report = {"model": str(path), "threads": n_threads, "weights": layout,
                  "ceilings": _ceilings_json(ceilings)}
        click.echo(json.dumps(report | {p.name: _phase_json(p, ceilings) for p in phases}))
        return
    for phase in phases:
        click.echo("\n".join(table(phase, ceilings)) + "\n")
    arithmetic = engine.options.target.arithmetic
    click.echo(f"{n_threads} threads, {arithmetic}, weights {layout}; ceilings: "
               f"{ceilings.bandwidth_gb_s:.1f} GB/s, {ceilings.int8_gmac_s:.0f} int8 GMAC/s, "
               f"{ceilings.f32_gmac_s:.0f} f32 GMAC/s")


def table(phase: PhaseProfile, ceilings: counting.Ceilings) -> list[str]:
    """A phase for people: a line a group, then the whole step."""
    size = phase.size
    rows: list[tuple[str, ...]] = [
        ("step", "kernel", "runs", "us", "share", "GB/s", "GMAC/s", "of ceiling")
    ]
    rows += [(group.label, group.kernel, str(group.n_launches), *_figures(
                 group.seconds, phase.seconds, group.work, group.work.least_seconds(ceilings)))
             for group in phase.groups]
    n_launches = str(sum(group.n_launches for group in phase.groups))
    least = sum(group.work.least_seconds(ceilings) for group in phase.groups)
    rows.append(("all", "", n_launches,
                 *_figures(phase.seconds, phase.seconds, phase.work, least)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"{phase.name}: {size.n_tokens} tokens behind {size.n_past}, "
             f"{size.n_tokens / phase.seconds:.1f} tokens/s (median of {phase.n_runs} runs)"]
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(names + numbers).rstrip())
    return lines


def _figures(seconds: float, whole: float, work: Work, least: float) -> tuple[str, ...]:
    rates = [f"{amount / seconds / _NS:.1f}" if amount and seconds else ""
             for amount in (work.nbytes, work.macs)]
    share = f"{100 * seconds / whole:.1f}%" if whole else ""
    return (f"{seconds * 1e6:.1f}", share, *rates, _percent(least, seconds))


def _percent(least: float, seconds: float) -> str:
    return f"{100 * least / seconds:.0f}%" if least and seconds else ""


def _phase_json(phase: PhaseProfile, ceilings: counting.Ceilings) -> dict[str, Any]:
    size = phase.size
    return {
        "tokens": size.n_tokens, "past": size.n_past, "runs": phase.n_runs,
        "seconds": phase.seconds, "tok_s": round(size.n_tokens / phase.seconds, 3),
        **_work_json(phase.work),
        "steps": [
            {"step": group.label, "kernel": group.kernel, "runs": group.n_launches,
             "seconds": group.seconds, "share": round(group.seconds / phase.seconds, 5),
             **_work_json(group.work),
             "of_ceiling": _ratio(group.work.least_seconds(ceilings), group.seconds)}
            for group in phase.groups
        ],
    }  # fmt: skip


def _work_json(work: Work) -> dict[str, int]:
    return {"int8_macs": work.int8_macs, "f32_macs": work.f32_macs,
            "weight_bytes": work.weight_nbytes, "kv_bytes": work.kv_nbytes}


def _ratio(least: float, seconds: float) -> float | None:
    return round(least / seconds, 4) if least and seconds else None


def _ceilings_json(ceilings: counting.Ceilings) -> dict[str, float]:
    return {name: round(getattr(ceilings, name), 3)
            for name in ("bandwidth_gb_s", "int8_gmac_s", "f32_gmac_s")}
