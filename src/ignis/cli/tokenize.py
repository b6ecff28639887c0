"""`ignis tokenize`: text to token ids."""

from __future__ import annotations

import click

from ignis.cli.options import checked_text, model_option, pre_option, read_text, tell


@click.command(short_help="text to token ids")
@model_option(required=True)
@click.option("--special", is_flag=True, help="Control tokens written in the text are such.")
@click.option("--ids", "ids_only", is_flag=True, help="Ids only, no list of pieces on stderr.")
@pre_option
@click.argument("text", required=False)
def tokenize(
    model: str, special: bool, ids_only: bool, pre: str | None, text: str | None
) -> None:
    """Print the token ids of TEXT, or of stdin, in one line.

    Works on files that hold only a vocabulary. The ids go to stdout; without --ids, stderr shows
    the piece of text that each stands for.
    """
    from ignis import hub
    from ignis.cli.progress import TerminalProgress
    from ignis.gguf import open_gguf
    from ignis.settings import Settings
    from ignis.text import Tokenizer

    path = hub.resolve(model, Settings.from_env(), TerminalProgress(mention_present=False))
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_gguf(file, pre=pre)
        checked = read_text(None) if text is None else checked_text(text, "TEXT")
        ids = tokenizer.encode(checked, special=special)
        if not ids_only:
            for token_id in ids:
                tell(f"{token_id:>7} {tokenizer.decode([token_id], skip_special=False)!r}")
        click.echo(" ".join(map(str, ids)))
