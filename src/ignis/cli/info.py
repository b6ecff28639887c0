"""`ignis info`: what a model file holds, and the memory a run of it needs."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from ignis.cli.options import context_option, json_option

if TYPE_CHECKING:
    from ignis.gguf import GGUFFile

_DEFAULT_CONTEXT = 4096     # tokens; models announce up to a million, and few runs want them
_CHUNK = 512                # tokens of a prompt that one step takes
_KV_NBYTES = 2              # f16
_SHOWN_TEXT = 60


@click.command(short_help="what a model file holds and needs")
@click.argument("model", metavar="MODEL")
@context_option
@json_option
def info(model: str, n_ctx: int | None, as_json: bool) -> None:
    """Show architecture, metadata, tensors by type, tokenizer and memory of MODEL.

    Nothing is compiled, and no weight is read. MODEL is a GGUF file or a name as for `ignis pull`.
    """
    from ignis import hub
    from ignis.cli.progress import TerminalProgress
    from ignis.gguf import open_gguf
    from ignis.settings import Settings

    path = hub.resolve(model, Settings.from_env(), TerminalProgress(mention_present=False))
    with open_gguf(path) as file:
        description = describe(file, n_ctx)
    if as_json:
        click.echo(json.dumps(description, ensure_ascii=False, indent=2, allow_nan=True))
    else:
        click.echo("\n".join(text_lines(description)))


def describe(file: GGUFFile, n_ctx: int | None) -> dict[str, Any]:
    """Everything that `info` shows, as JSON values. Sizes are bytes."""
    by_type: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        row = by_type.setdefault(tensor.format.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += math.prod(tensor.shape)
        row["bytes"] += tensor.nbytes
    total: Counter[str] = Counter()
    for row in by_type.values():
        total.update(row)
    return {
        "path": str(file.path),
        "gguf_version": file.version,
        "architecture": file.get("general.architecture", "unknown"),
        "name": file.get("general.name", ""),
        "tensors": {"total": dict(total), "by_type": by_type},
        "tokenizer": _tokenizer(file),
        "memory": memory(file, n_ctx, total["bytes"]),
        "metadata": {key: _plain(value) for key, value in file.metadata.items()},
    }


def memory(file: GGUFFile, n_ctx: int | None, weights_nbytes: int) -> dict[str, int]:
    """An estimate in bytes for a context of `n_ctx` tokens.

    Weights stay in the mapped file; the cache is f16 and is committed as it fills; activations are
    those of one prompt chunk with the logits of its last token. Zero where the file does not say.
    """
    architecture = file.get("general.architecture", "")

    def size(key: str, default: int = 0) -> int:
        value = file.metadata.get(f"{architecture}.{key}", default)
        return value if isinstance(value, int) else default

    n_heads = size("attention.head_count")
    width = size("embedding_length")
    head_width = width // n_heads if n_heads else 0
    n_kv_heads = size("attention.head_count_kv", n_heads)
    row = n_kv_heads * (size("attention.key_length", head_width)
                        + size("attention.value_length", head_width))
    context = n_ctx or min(size("context_length") or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    kv_cache = size("block_count") * row * _KV_NBYTES * context
    n_vocab = len(tokens) if (tokens := _tokens(file)) is not None else 0
    # Live at once in the widest place: two hidden values, the residual stream and its A8 form.
    activations = 4 * (_CHUNK * (2 * size("feed_forward_length") + 2 * width) + n_vocab)
    return {"context": context, "weights": weights_nbytes, "kv_cache": kv_cache,
            "activations": activations, "total": weights_nbytes + kv_cache + activations}


def _tokens(file: GGUFFile) -> Any:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return tokens if hasattr(tokens, "__len__") else None


def _tokenizer(file: GGUFFile) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    tokens = _tokens(file)
    special = {key.removeprefix(prefix).removesuffix("_token_id"): value
               for key, value in file.metadata.items()
               if key.startswith(prefix) and key.endswith("_token_id")}
    return {"model": _plain(file.metadata.get(f"{prefix}model", "none")),
            "pre": _plain(file.metadata.get(f"{prefix}pre", "")),
            "tokens": 0 if tokens is None else len(tokens),
            "special_ids": {key: _plain(value) for key, value in special.items()},
            "chat_template": "tokenizer.chat_template" in file.metadata}


def _plain(value: Any) -> Any:
    """A metadata value as JSON; a long array as its length."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return {"array": len(value)}


def text_lines(description: dict[str, Any]) -> list[str]:
    """The description for people. Names come from untrusted files: control characters are shown."""
    tokenizer, needs = description["tokenizer"], description["memory"]
    total = description["tensors"]["total"]
    lines = [
        f"file          {description['path']} (GGUF v{description['gguf_version']})",
        f"architecture  {description['architecture']}",
        f"name          {description['name']}",
        f"parameters    {total.get('parameters', 0) / 1e6:.1f} M in {total.get('tensors', 0)} "
        f"tensors, {_mib(total.get('bytes', 0))}",
    ]
    lines += [f"  {name:<12}{row['tensors']:>5} tensors {row['parameters'] / 1e6:>10.2f} M "
              f"{_mib(row['bytes']):>13}"
              for name, row in sorted(description["tensors"]["by_type"].items())]
    special = ", ".join(f"{k} {v}" for k, v in tokenizer["special_ids"].items())
    lines += [
        f"tokenizer     {tokenizer['model']}, pre-tokenizer {tokenizer['pre'] or 'not named'}, "
        f"{tokenizer['tokens']} tokens",
        f"  special     {special or 'none'}",
        f"  template    {'in the file' if tokenizer['chat_template'] else 'none'}",
        f"memory        {_mib(needs['total'])} with a context of {needs['context']} tokens (--ctx)",
        f"  weights     {_mib(needs['weights'])}, mapped",
        f"  KV cache    {_mib(needs['kv_cache'])}, committed as it fills",
        f"  activations {_mib(needs['activations'])}",
        "metadata",
    ]
    lines += [f"  {key} = {_short(value)}" for key, value in description["metadata"].items()]
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"array of {value['array']}"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + "..."
