"""`ignis pull`: fetch a model into the cache."""

from __future__ import annotations

import click

from ignis.cli.interrupt import orderly_termination
from ignis.cli.options import quiet_option


@click.command(short_help="fetch a model")
@click.argument("name", metavar="NAME")
@quiet_option
def pull(name: str, quiet: bool) -> None:
    """Fetch the model NAME unless it is there, check it, and print its path.

    NAME is smollm2, gemma3-270m, or a Hugging Face repository with a quantization, for example
    Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0 (needs `pip install 'ignis-llm[hub]'`).
    """
    from ignis import hub
    from ignis.cli.progress import TerminalProgress
    from ignis.settings import Settings

    with orderly_termination():
        path = hub.pull(name, Settings.from_env(), TerminalProgress(quiet))
    click.echo(path)
