"""The command line: `ignis run`, `info`, `bench`, `tokenize`, `pull`.

Text goes to stdout, everything else to stderr. Exit codes: 0 done, 1 an error (one line), 2 a
command line that makes no sense (one line), 130 ended by Ctrl-C.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process. The entry point of the `ignis` script."""
    try:
        gc.disable()    # until a command is there: imports make no garbage
        from ignis.cli.app import run_app

        code = run_app(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:   # so early, or so late, that no command hears it
        code = 130
    sys.exit(code)
