"""The chat of `ignis run` on a terminal: several turns, `/bye` or Ctrl-D leaves."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from ignis.cli.options import tell
from ignis.cli.run import RunOptions, stats_line, stream
from ignis.errors import IgnisError

if TYPE_CHECKING:
    from ignis.api import Model

_PROMPT = ">>> "


def chat(model: Model, options: RunOptions) -> int:
    """Ask and answer until the user leaves; the exit code.

    Ctrl-C during an answer ends the answer, and at the prompt the chat.
    """
    with contextlib.suppress(ImportError):      # not in every build of Python
        import readline  # noqa: F401 - importing it gives `input` its line editing and history
    tell("/bye leaves, /clear forgets the conversation", options.quiet)
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    while True:
        try:
            text = _ask()
        except EOFError:
            tell("")
            return 0
        except KeyboardInterrupt:
            tell("")
            return 130
        match text:
            case "":
                continue
            case "/bye" | "/exit" | "/quit":
                return 0
            case "/clear":
                messages = list(opening)
                continue
        messages.append({"role": "user", "content": text})
        try:
            generation = model.chat(messages, **options.sampling)
            said, _ = stream(generation, sys.stdout)
        except IgnisError as error:     # a conversation that is too long must not end the program
            tell(f"error: {error}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": said})
        tell(stats_line(generation.stats), options.quiet)


def _ask() -> str:
    if sys.stdout.isatty():
        return input(_PROMPT).strip()
    print(_PROMPT, end="", file=sys.stderr, flush=True)     # stdout is for answers only
    return input().strip()
