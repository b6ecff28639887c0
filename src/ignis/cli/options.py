"""Options that several commands share, and reading a text from a flag, a file or stdin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ignis.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINES = ("graph", "imperative", "reference")

threads_option = click.option(
    "--threads", type=click.IntRange(1), metavar="J",
    help="Number of threads.  [default: the processors that may be used]")
context_option = click.option(
    "--ctx", "n_ctx", type=click.IntRange(1), metavar="N",
    help="Tokens that prompt and answer may have together.")
pre_option = click.option(
    "--pre", metavar="NAME", help="Pre-tokenizer to use instead of the one the file names.")
weights_option = click.option(
    "--weights", type=click.Choice(["auto", "mapped", "packed"]), default="auto",
    show_default=True, help="Read weights where the file is mapped, or repacked in memory.")
kv_type_option = click.option(
    "--kv-type", type=click.Choice(["f32", "f16", "q8_0"]), default="f16", show_default=True,
    help="How keys and values are kept: exactly, in half, or in a quarter of the memory.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")


def model_option(required: bool = False) -> Callable[[Command], Command]:
    return click.option(
        "-m", "--model", metavar="MODEL", required=required,
        help="A GGUF file, or a name as for `ignis pull`."
             + ("" if required else "  [default: smollm2]"))


def checked_text(text: str, where: str) -> str:
    """Raise `UsageError` for an argument that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("not UTF-8", where=where, got=f"byte 0x{ord(text[error.start]) & 255:02x}"
                         ) from None
    return text


def read_text(path: Path | None) -> str:
    """A prompt from a file, or from stdin. One line break at the end is the editor's, and goes."""
    where = "stdin" if path is None else str(path)
    try:
        if path is not None:
            data = path.read_bytes()
        else:
            # A test's or a caller's stdin may be text without a buffer below it.
            buffer = getattr(sys.stdin, "buffer", None)
            data = cast(bytes, buffer.read()) if buffer else sys.stdin.read().encode()
        text = data.decode()
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=where) from None
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8", where=where, got=f"byte 0x{data[error.start]:02x} at offset "
                         f"{error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")


def tell(text: str, quiet: bool = False) -> None:
    """One remark on stderr."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)
