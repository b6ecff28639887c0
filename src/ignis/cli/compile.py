"""`ignis compile`: what the compiler makes of a model, stage by stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ignis.cli.options import (
    context_option,
    json_option,
    quiet_option,
    tell,
    threads_option,
    weights_option,
)
from ignis.errors import UsageError

if TYPE_CHECKING:
    from ignis.inspect import Compilation

_NAIVE = "lowering"  # as if it were a pass: the graph before all of them
_MEMORY = "plan_memory"  # the last: offsets as comments, in steps of one token


@click.command("compile", short_help="what the compiler makes of a model")
@click.argument("model", metavar="MODEL")
@click.option("--dump-after", metavar="PASS",
              help="Print the graph behind PASS as text; `lowering`: before all passes; "
                   "`plan_memory`: with offsets for one token.")
@click.option("--emit", type=click.Choice(["llvm", "asm"]),
              help="Print each kernel's Python source and the code it becomes.")
@click.option("--kernel", metavar="NAME", help="With --emit: only this kernel.")
@click.option("--dot", "as_dot", is_flag=True, help="Print the final graph for Graphviz.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write one self-contained page: graphs, rewrites, memory, steps, code.")
@click.option("--profile", "with_profile", is_flag=True,
              help="With --html: run the model, and show the time of each step.")
@click.option("--disable", multiple=True, metavar="PASS", help="Leave PASS out; may be repeated.")
@click.option("--verify", "check", is_flag=True,
              help="Check every rule before and after every pass, and of every plan.")
@weights_option
@context_option
@threads_option
@json_option
@quiet_option
def compile(  # noqa: A001 - the command's name
    model: str, dump_after: str | None, emit: str | None, kernel: str | None, as_dot: bool,
    html: Path | None, with_profile: bool, disable: tuple[str, ...], check: bool, weights: str,
    n_ctx: int | None, threads: int | None, as_json: bool, quiet: bool,
) -> None:
    """Show how MODEL is compiled: passes, plans and code. Nothing is run, unless --profile.

    MODEL is a GGUF file or a name as for `ignis pull`.
    """
    from ignis import hub
    from ignis.cli.progress import TerminalProgress
    from ignis.gguf import open_gguf
    from ignis.inspect import inspect_model
    from ignis.inspect.dot import dot
    from ignis.inspect.page import write_page
    from ignis.inspect.report import report, text_lines
    from ignis.native.host import chosen_target
    from ignis.settings import Settings

    if kernel is not None and emit is None:
        raise UsageError("--kernel names whose code is shown", hint="add --emit asm or --emit llvm")
    if with_profile and html is None:
        raise UsageError("--profile goes into the page", hint="add --html, or see `ignis profile`")
    settings = Settings.from_env()
    path = hub.resolve(model, settings, TerminalProgress(quiet, mention_present=False))
    with open_gguf(path) as file:
        compilation = inspect_model(
            file, disabled=disable, check=check, weights=weights, n_ctx=n_ctx
        )
    if dump_after is not None:
        click.echo(_dump(compilation, dump_after), nl=False)
    elif emit is not None:
        _emit(compilation, emit, kernel)
    elif as_dot:
        click.echo(dot(compilation.graph), nl=False)
    elif html is not None:
        profile = None
        if with_profile:
            from ignis.inspect.timing import profile_model

            profile = profile_model(path, settings, n_threads=threads, n_ctx=n_ctx,
                                    weights=weights, disabled=disable)  # fmt: skip
        write_page(compilation, html, chosen_target(settings.target), profile)
        tell(f"wrote {html} ({html.stat().st_size / 1024:.0f} KiB)", quiet)
    elif as_json:
        click.echo(json.dumps(report(compilation), indent=2))
    else:
        click.echo("\n".join(text_lines(report(compilation))))


def _dump(compilation: Compilation, name: str) -> str:
    """The graph behind a pass as text."""
    from ignis.graph.ir import print_graph
    from ignis.graph.passes import PIPELINE
    from ignis.inspect.report import planned_text

    if name == _NAIVE:
        return print_graph(compilation.naive)
    for snapshot in compilation.passes:
        if snapshot.report.name == name:
            return print_graph(snapshot.after)
    if name == _MEMORY and compilation.reuse:
        return planned_text(compilation.plan(1, 1))
    known = [_NAIVE, *(step.name for step in PIPELINE), _MEMORY]
    what = "this pass is switched off" if name in known else "no such pass"
    raise UsageError(what, got=name, wanted=" or ".join(known))


def _emit(compilation: Compilation, form: str, name: str | None) -> None:
    from ignis.inspect.code import find_kernels, kernel_code
    from ignis.native.host import chosen_target
    from ignis.settings import Settings

    target = chosen_target(Settings.from_env().target)
    for kernel in find_kernels(compilation.kernels(), name):
        shown = kernel_code(kernel, target, form)
        click.echo(f"# {shown.symbol}: {shown.file}, line {shown.line}\n\n{shown.source}")
        mark = "#" if form == "asm" else ";"
        click.echo(f"{mark} {form} for {target.cpu}\n\n{shown.code}")
