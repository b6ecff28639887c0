"""`ignis perplexity`: how well a model predicts a text, and how far it is from another run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ignis.cli.options import (
    ENGINES,
    json_option,
    kv_type_option,
    model_option,
    pre_option,
    quiet_option,
    read_text,
    tell,
    threads_option,
    weights_option,
)

if TYPE_CHECKING:
    from ignis.perplexity import Divergence, Estimate, KLBase, PerplexityResult


@click.command(short_help="score a text, compare with other weights")
@model_option()
@click.option("-f", "--file", type=click.Path(path_type=Path), metavar="TEXT",
              help="Score the text in this file.  [default: the base's text, or stdin]")
@click.option("--ctx", "n_ctx", type=click.IntRange(1), metavar="N",
              help="Tokens of a window; the second half of each is scored.  "
                   "[default: the base's, or 512]")
@click.option("--save-kl", type=click.Path(path_type=Path), metavar="BASE",
              help="Write the distributions of all scored tokens to this file.")
@click.option("--kl-base", type=click.Path(path_type=Path), metavar="BASE",
              help="Compare with the distributions in this file.")
@click.option("--engine", type=click.Choice(ENGINES), default="graph", show_default=True,
              help="Compiled plan, op by op, or the float64 reference.")
@threads_option
@weights_option
@kv_type_option
@pre_option
@json_option
@quiet_option
def perplexity(
    model: str | None, file: Path | None, n_ctx: int | None, save_kl: Path | None,
    kl_base: Path | None, engine: str, threads: int | None, weights: str, kv_type: str,
    pre: str | None, as_json: bool, quiet: bool,
) -> None:
    """Score a text with MODEL: perplexity with its standard error.

    The text is cut into windows, and the second half of each is scored, as llama.cpp's tool does.
    To see what a quantization costs, run the original with --save-kl and the other with --kl-base.
    """
    if save_kl is not None and kl_base is not None:
        raise click.UsageError("--save-kl and --kl-base exclude each other")
    import ignis
    from ignis import hub
    from ignis.cli.interrupt import orderly_termination, prompt_interrupt
    from ignis.cli.progress import TerminalProgress, WindowProgress
    from ignis.perplexity import measure_perplexity, open_kl_base
    from ignis.perplexity.windows import DEFAULT_CTX
    from ignis.settings import Settings

    base = None if kl_base is None else open_kl_base(kl_base)
    text = _text(file, base)
    context = n_ctx or (DEFAULT_CTX if base is None else base.windows.n_ctx)
    path = hub.resolve(model, Settings.from_env(), TerminalProgress(quiet, mention_present=False))
    with prompt_interrupt():    # while it compiles; steps watch for Ctrl-C themselves
        loaded = ignis.load(path, threads=threads, n_ctx=context, engine=engine, pre=pre,
                            weights=weights, kv_type=kv_type)
    with orderly_termination(), loaded, WindowProgress(context, quiet) as progress:
        result = measure_perplexity(loaded, text, n_ctx=context, kl_base=base, save_kl=save_kl,
                                    progress=progress.advance)
    if save_kl is not None:
        tell(f"saved {save_kl} ({save_kl.stat().st_size / 2**20:.1f} MiB)", quiet)
    if as_json:
        click.echo(json.dumps({"model": str(path), "engine": engine, **result_json(result)}))
    else:
        click.echo("\n".join(text_lines(result)))


def _text(file: Path | None, base: KLBase | None) -> str | None:
    """The text to score; None for the base's own."""
    if file is None and base is not None:
        return None
    if file is None and sys.stdin.isatty():
        raise click.UsageError("give a text with -f or on stdin")
    return read_text(file)


def text_lines(result: PerplexityResult) -> list[str]:
    """The result for people."""
    lines = [f"perplexity        {result.perplexity}"]
    if (found := result.against_base) is not None:
        rms = found.rms_probability
        lines += [
            f"of the base       {found.base_perplexity}",
            f"ratio             {_fixed(found.ratio, 6)}",
            f"KL divergence     mean {_fixed(found.kl, 6)}, median {found.kl_median:.6f}, "
            f"99.9 % {found.kl_999:.4f}, largest {found.kl_max:.4f}",
            f"top token equal   {_fixed(found.same_top, 2, 100)} %",
            f"probability       root mean square difference {_fixed(rms, 3, 100)} %",
        ]
    rate = result.n_fed / result.seconds if result.seconds else math.inf
    return [*lines, f"{result.n_scored} tokens scored in {result.n_windows} windows of "
            f"{result.n_ctx}, {result.seconds:.1f} s, {rate:.0f} tokens/s"]


def _fixed(estimate: Estimate, digits: int, factor: int = 1) -> str:
    return (f"{estimate.value * factor:.{digits}f} +/- "
            f"{estimate.error * factor:.{digits}f}")


def result_json(result: PerplexityResult) -> dict[str, Any]:
    """The result as JSON values: nats, shares between 0 and 1, seconds."""
    return {
        "perplexity": _json(result.perplexity), "ctx": result.n_ctx, "windows": result.n_windows,
        "scored_tokens": result.n_scored, "seconds": round(result.seconds, 3),
        "tok_s": round(result.n_fed / result.seconds, 3) if result.seconds else None,
        "base": None if result.against_base is None else _base_json(result.against_base),
    }


def _base_json(found: Divergence) -> dict[str, Any]:
    return {
        "perplexity": _json(found.base_perplexity), "ratio": _json(found.ratio),
        "kl": {**_json(found.kl), "median": found.kl_median, "p99.9": found.kl_999,
               "max": found.kl_max},
        "same_top": _json(found.same_top), "rms_probability": _json(found.rms_probability),
    }


def _json(estimate: Estimate) -> dict[str, float | None]:
    """JSON has no infinity: null."""
    return {"value": _number(estimate.value), "error": _number(estimate.error)}


def _number(x: float) -> float | None:
    return x if math.isfinite(x) else None
