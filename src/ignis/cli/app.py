"""The group of commands, and how each of them may end."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

import click

from ignis import __version__
from ignis.errors import IgnisError, _one_line

INTERRUPTED = 130
_COMMANDS = {
    "run": "answer a prompt, or chat",
    "info": "what a model file holds and needs",
    "bench": "measure the engines",
    "compile": "what the compiler makes of a model",
    "profile": "where the time of a step goes",
    "perplexity": "score a text, compare with other weights",
    "tokenize": "text to token ids",
    "pull": "fetch a model",
    "quantize": "make a GGUF file of another type",
}


class LazyGroup(click.Group):
    """Imports the module of a command when that command is asked for: start-up stays short."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(f"ignis.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        gc.freeze()     # see `ignis.cli.main`
        gc.enable()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of `--help`, without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=LazyGroup, invoke_without_command=True,
             context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ignis")
@click.pass_context
def app(context: click.Context) -> None:
    """Ignis compiles a GGUF language model to machine code for this processor, and runs it."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run_app(arguments: Sequence[str]) -> int:
    """Run a command line and return the exit code; every error is one line on stderr."""
    _prepare_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:     # the reader of a pipe has seen enough: not an error
        _drop_stdout()
        return 0
    except OSError as error:    # the flush: no space left behind a redirection
        _drop_stdout()
        _print_error(f"cannot write: {error.strerror}")
        return 1
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        # Not `app.main`: it ends the process by itself when a pipe is closed.
        with app.make_context("ignis", list(arguments)) as context:
            result = app.invoke(context)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        _print_error(error.format_message(), f"see {where} --help" if where else None)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("IGNIS_DEBUG", "0") not in ("", "0"):
            import traceback

            traceback.print_exc()
        elif isinstance(error, IgnisError):
            _print_error(str(error))
        elif isinstance(error, MemoryError):
            _print_error("out of memory", "a shorter --ctx needs less")
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _drop_stdout()      # what is still buffered would fail, and tell of it, once more
            _print_error(f"cannot write: {error.strerror}")
        else:
            _print_error(f"unexpected {type(error).__name__}: {error}",
                         "this is a bug in Ignis; IGNIS_DEBUG=1 shows where")
        return 1


def _print_error(message: str, hint: str | None = None) -> None:
    line = _one_line(" ".join(message.split()))
    if hint:
        line = f"{line.rstrip('.')}; {hint}"
    with contextlib.suppress(OSError):
        print(f"error: {line}", file=sys.stderr, flush=True)


def _prepare_streams() -> None:
    """Text is UTF-8 whatever the locale says; a stream that was closed beforehand is no trouble."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115 - as long as sys
            atexit.register(stream.close)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")


def _drop_stdout() -> None:
    """Keep the interpreter from flushing once more, and complaining, on its way out."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
