"""`ignis run`: answer one prompt, or chat."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from ignis.cli.options import (
    ENGINES,
    checked_text,
    context_option,
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
from ignis.errors import IgnisError, UsageError

if TYPE_CHECKING:
    from ignis.api import Generation, GenerationStats, Model


class RunOptions(NamedTuple):
    """The command line of `run`, checked."""

    prompt: str | None          # None: chat on the terminal
    system: str | None
    raw: bool
    special: bool
    as_json: bool
    quiet: bool
    sampling: dict[str, Any]    # keyword arguments of `Model.generate` and `Model.chat`


@click.command(short_help="answer a prompt, or chat")
@model_option()
@click.option("-p", "--prompt", metavar="PROMPT", help="The prompt.")
@click.option("-f", "--file", type=click.Path(path_type=Path), metavar="FILE",
              help="Read the prompt from FILE.  [default: from stdin; on a terminal: chat]")
@click.option("-n", "max_tokens", type=click.IntRange(-1), default=512, show_default=True,
              metavar="N", help="Tokens to generate at most; -1: until the model stops.")
@click.option("-t", "--temp", "temperature", type=float, default=0.0, show_default=True,
              metavar="TEMP", help="0 always takes the most probable token.")
@click.option("--top-k", type=int, default=0, metavar="K", help="Keep the K most probable tokens.")
@click.option("--top-p", type=float, default=1.0, metavar="P",
              help="Keep the most probable tokens that together reach P.")
@click.option("--min-p", type=float, default=0.0, metavar="P",
              help="Keep tokens of at least P times the most probable one.")
@click.option("--repeat-penalty", type=float, default=1.0, metavar="R",
              help="Above 1: make recent tokens less likely.")
@click.option("--seed", type=int, metavar="S", help="Same seed, same text, on any machine.")
@click.option("-s", "--system", metavar="SYSTEM", help="System prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without a chat template.")
@click.option("--special", is_flag=True, help="With --raw: control tokens written in the prompt.")
@click.option("--engine", type=click.Choice(ENGINES), default="graph", show_default=True,
              help="Compiled plan, op by op, or the float64 reference.")
@threads_option
@context_option
@click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be repeated.")
@weights_option
@kv_type_option
@pre_option
@json_option
@quiet_option
@click.option("-v", "--verbose", is_flag=True, help="Also tell the model's path and the seed.")
def run(
    model: str | None, prompt: str | None, file: Path | None, system: str | None, raw: bool,
    special: bool, engine: str, threads: int | None, n_ctx: int | None, weights: str, kv_type: str,
    pre: str | None, as_json: bool, quiet: bool, verbose: bool, seed: int | None,
    max_tokens: int, stop: tuple[str, ...], **sampling: Any,
) -> int:
    """Answer a prompt; without one, chat on the terminal (/bye leaves)."""
    gc.disable()    # nothing that imports and loading make is garbage: looking costs 30 ms
    from ignis.sampling import Sampler

    seed = Sampler(seed=seed, **sampling).seed      # checks all of them before a model is loaded
    for text in stop:
        if not checked_text(text, "--stop"):
            raise UsageError("an empty text would stop at once", where="--stop")
    if system is not None and raw:
        raise click.UsageError("-s needs the chat template, which --raw turns off")
    if special and not raw:
        raise click.UsageError("--special needs --raw: a chat message is never control tokens")
    options = RunOptions(
        prompt=_prompt(prompt, file, raw, as_json), raw=raw, special=special, as_json=as_json,
        system=None if system is None else checked_text(system, "-s"), quiet=quiet,
        sampling={**sampling, "seed": seed, "stop": list(stop),
                  "max_tokens": None if max_tokens < 0 else max_tokens})

    import ignis
    from ignis import hub
    from ignis.cli.interrupt import prompt_interrupt
    from ignis.cli.progress import TerminalProgress
    from ignis.settings import Settings

    path = hub.resolve(model, Settings.from_env(), TerminalProgress(quiet, mention_present=False))
    if verbose:
        tell(f"model {path}, seed {seed}", quiet)
    with prompt_interrupt():    # while it compiles; steps watch for Ctrl-C themselves
        loaded = ignis.load(path, threads=threads, n_ctx=n_ctx, engine=engine, pre=pre,
                            weights=weights, kv_type=kv_type, prepare_chat=not raw)
    gc.freeze()     # or the first look, 18 ms, would come before the answer
    gc.enable()
    with loaded:
        for line in loaded.report.lines():
            tell(line, quiet)
        if options.prompt is None:
            from ignis.cli.chat import chat

            return chat(loaded, options)
        return answer(loaded, options, str(path))


def _prompt(prompt: str | None, file: Path | None, raw: bool, as_json: bool) -> str | None:
    if prompt is not None and file is not None:
        raise click.UsageError("-p and -f exclude each other")
    if prompt is None and file is None and sys.stdin.isatty():
        if as_json or raw:
            raise click.UsageError("give a prompt with -p, -f or on stdin")
        return None
    text = read_text(file) if prompt is None else checked_text(prompt, "-p")
    if not text and not raw:
        raise UsageError("the prompt is empty", hint="give one with -p, -f or on stdin")
    return text


def answer(model: Model, options: RunOptions, path: str) -> int:
    """Stream one answer, or print it as JSON; the exit code."""
    assert options.prompt is not None
    if options.raw:
        generation = model.generate(options.prompt, special=options.special, **options.sampling)
    else:
        system = [{"role": "system", "content": options.system}] if options.system else []
        generation = model.chat([*system, {"role": "user", "content": options.prompt}],
                                **options.sampling)
    text, interrupted = stream(generation, None if options.as_json else sys.stdout)
    if options.as_json:
        summary = _summary(generation, text, interrupted)
        print(json.dumps({"model": path, **summary, "seed": options.sampling["seed"]},
                         ensure_ascii=False), flush=True)
    tell(stats_line(generation.stats), options.quiet)
    return 130 if interrupted else 0


def stream(generation: Generation, out: TextIO | None) -> tuple[str, bool]:
    """Write the pieces as they come. Returns the whole text, and whether Ctrl-C ended it."""
    pieces: list[str] = []
    try:
        for piece in generation:
            pieces.append(piece)
            if out is not None:
                out.write(piece)
                out.flush()
    except KeyboardInterrupt:
        _end_line(pieces, out)
        return "".join(pieces), True
    except IgnisError:      # what was said stays on a line of its own
        _end_line(pieces, out)
        raise
    _end_line(pieces, out)
    return "".join(pieces), False


def _end_line(pieces: list[str], out: TextIO | None) -> None:
    if out is not None and pieces and not pieces[-1].endswith("\n"):
        out.write("\n")
        out.flush()


def stats_line(stats: GenerationStats) -> str:
    """`[32 prompt tok in 0.55s (58.1 tok/s) | 24 gen tok in 0.46s (52.1 tok/s)]`"""
    return (f"[{_rate(stats.n_prompt, 'prompt', stats.prompt_seconds)} | "
            f"{_rate(stats.n_generated, 'gen', stats.decode_seconds)}]")


def _rate(n_tokens: int, kind: str, seconds: float) -> str:
    return f"{n_tokens} {kind} tok in {seconds:.2f}s ({_per_second(n_tokens, seconds):.1f} tok/s)"


def _per_second(n_tokens: int, seconds: float) -> float:
    return n_tokens / seconds if seconds > 0 else 0.0


def _summary(generation: Generation, text: str, interrupted: bool) -> dict[str, Any]:
    stats = generation.stats
    return {
        "text": text,
        "token_ids": [int(i) for i in generation.token_ids],
        "finish_reason": "interrupted" if interrupted else stats.finish_reason,
        "prompt_tokens": stats.n_prompt,
        "generated_tokens": stats.n_generated,
        "prompt_tok_s": round(_per_second(stats.n_prompt, stats.prompt_seconds), 3),
        "tok_s": round(_per_second(stats.n_generated, stats.decode_seconds), 3),
    }
