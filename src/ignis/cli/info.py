"""`ignis info`: what a model file holds, whether it will run, and the memory that it needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ignis.cli.options import (
    context_option,
    json_option,
    kv_type_option,
    threads_option,
    weights_option,
)

if TYPE_CHECKING:
    from ignis.inspect.outlook import Outlook

_SHOWN_TEXT = 60


@click.command(short_help="what a model file holds and needs")
@click.argument("model", metavar="MODEL")
@context_option
@weights_option
@kv_type_option
@threads_option
@json_option
def info(model: str, n_ctx: int | None, weights: str, kv_type: str, threads: int | None,
         as_json: bool) -> None:
    """Show what MODEL is, whether it will run here, and the memory that it will take.

    Nothing is compiled, and no matrix is read. MODEL is a GGUF file (of a split one any part), or
    a name as for `ignis pull`. The exit code is 1 for a model that cannot be run.
    """
    from ignis import hub
    from ignis.cli.progress import TerminalProgress
    from ignis.gguf import open_gguf
    from ignis.inspect.contents import contents
    from ignis.inspect.outlook import RunOptions, outlook
    from ignis.runtime.threads import available_threads
    from ignis.settings import Settings

    settings = Settings.from_env()
    path = hub.resolve(model, settings, TerminalProgress(mention_present=False))
    n_threads = threads or settings.threads or available_threads()
    with open_gguf(path) as file:
        description = contents(file)
        found = outlook(file, RunOptions(n_threads, n_ctx, weights, kv_type))
    description |= outlook_json(found, kv_type)
    if as_json:
        click.echo(json.dumps(description, ensure_ascii=False, indent=2, allow_nan=True))
    else:
        click.echo("\n".join(text_lines(description)))
    if found.problems:
        raise found.problems[0]


def outlook_json(found: Outlook, kv_type: str) -> dict[str, Any]:
    """Whether it runs, and what it takes, as JSON values."""
    needs = found.needs
    memory = None if needs is None else {
        "context": found.n_ctx, "layout": found.layout, "kv_type": kv_type,
        "weights": needs.mapped_weights + needs.packed_weights,
        "mapped_weights": needs.mapped_weights, "packed_weights": needs.packed_weights,
        "kv_cache": needs.kv_cache, "activations": needs.activations, "tables": needs.tables,
        "vocabulary": needs.vocabulary_file + needs.tokenizer, "program": needs.program,
        "own": needs.own, "total": needs.total, "free": found.free_nbytes,
    }
    return {"runs": not found.problems, "problems": [str(error) for error in found.problems],
            "remarks": list(found.remarks), "memory": memory}


def text_lines(description: dict[str, Any]) -> list[str]:
    """The description for people. Names come from untrusted files: control characters are shown."""
    lines = [*_model_lines(description), *_tensor_lines(description["tensors"]),
             *_tokenizer_lines(description["tokenizer"]), *_outlook_lines(description), "metadata"]
    lines += [f"  {key} = {_short(value)}" for key, value in description["metadata"].items()]
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def _model_lines(description: dict[str, Any]) -> list[str]:
    parts = "" if description["files"] == 1 else f", {description['files']} parts"
    shape = ", ".join(f"{name.replace('_', ' ')} {value}"
                      for name, value in description["shape"].items() if name != "context")
    rope = ", ".join(f"{key} {value}" for key, value in description["rope"].items())
    return [
        f"file          {description['path']} (GGUF v{description['gguf_version']}, "
        f"{_mib(description['bytes'])}{parts})",
        f"architecture  {description['architecture']}",
        f"name          {description['name']}",
        f"file type     {description['file_type'] or 'not named'}",
        f"shape         {shape}",
        f"context       {description['shape'].get('context', 'not named')} tokens in training",
        f"rope          {rope or 'as the architecture has it'}",
    ]


def _tensor_lines(tensors: dict[str, Any]) -> list[str]:
    total = tensors["total"]
    lines = [f"parameters    {total.get('parameters', 0) / 1e6:.1f} M in "
             f"{total.get('tensors', 0)} tensors, {_mib(total.get('bytes', 0))}, "
             f"{tensors['bits_per_weight'] or 0:.2f} bits each"]
    lines += [f"  {name:<12}{row['tensors']:>5} tensors {row['parameters'] / 1e6:>10.2f} M "
              f"{_mib(row['bytes']):>13} {100 * row['share']:>6.1f} %"
              for name, row in sorted(tensors["by_type"].items())]
    return lines + [f"  {name:<17} " + ", ".join(f"{n} {format}" for format, n in row.items())
                    for name, row in tensors["groups"].items()]


def _tokenizer_lines(tokenizer: dict[str, Any]) -> list[str]:
    special = ", ".join(f"{k} {v}" for k, v in tokenizer["special_ids"].items())
    return [
        f"tokenizer     {tokenizer['model']}, pre-tokenizer {tokenizer['pre'] or 'not named'}, "
        f"{tokenizer['tokens']} tokens",
        f"  special     {special or 'none'}",
        f"  template    {'in the file' if tokenizer['chat_template'] else 'none'}",
    ]


def _outlook_lines(description: dict[str, Any]) -> list[str]:
    lines = [f"runs          {'yes' if description['runs'] else 'no'}"]
    lines += [f"  {problem}" for problem in description["problems"]]
    if (needs := description["memory"]) is not None:
        lines += [
            f"memory        {_mib(needs['total'])} with a context of {needs['context']} tokens "
            f"(--ctx), {_mib(needs['free'])} are free",
            f"  weights     {_mib(needs['weights'])}, {needs['layout']} (--weights)",
            f"  KV cache    {_mib(needs['kv_cache'])}, {needs['kv_type']} (--kv-type), "
            "committed as it fills",
            f"  activations {_mib(needs['activations'])}",
            f"  tables      {_mib(needs['tables'])}",
            f"  vocabulary  {_mib(needs['vocabulary'])}",
            f"  program     {_mib(needs['program'])}, Python and its libraries",
        ]
    return lines + [f"  {remark}" for remark in description["remarks"]]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"array of {value['array']}"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + "..."
