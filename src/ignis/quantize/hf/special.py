"""Special ids, what is added around a text, and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignis.errors import ModelFileError, TokenizerError
from ignis.quantize.hf.config import kind_of, read_object

_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' names, and GGUF's."""
_MORE_ENDS = ("eot", "eom")
"""GGUF's names for further tokens that end a reply: its `eos` is only one."""


def read_special(folder: Path, description: Mapping[str, Any], settings: Mapping[str, Any],
                 ids: Mapping[str, int], n_vocab: int) -> dict[str, Any]:
    """The keys for special tokens; `ids` finds a token by its spelling.

    tokenizer_config.json says which tokens are special; config.json and generation_config.json
    name ids where it does not, and all the ids that end a reply.
    """
    numbers = _numbers(folder)
    keys: dict[str, Any] = {}
    for name, gguf in _NAMES.items():
        spelled = ids.get(_content(settings.get(f"{name}_token")) or "")
        found = [spelled] if spelled is not None else _ids(f"{name}_token_id", numbers, n_vocab)
        if found:
            keys[f"tokenizer.ggml.{gguf}_token_id"] = found[0]
    ends = _ids("eos_token_id", numbers, n_vocab)
    others = [i for i in ends if i != keys["tokenizer.ggml.eos_token_id"]]
    keys |= {f"tokenizer.ggml.{name}_token_id": i
             for name, i in zip(_MORE_ENDS, others, strict=False)}
    for name, place in (("bos", 0), ("eos", -1)):
        if (adds := _adds(name, place, description, settings, folder)) is not None:
            keys[f"tokenizer.ggml.add_{name}_token"] = adds
    return keys | _templates(folder, settings)


def _numbers(folder: Path) -> list[Mapping[str, Any]]:
    generation = read_object(folder / "generation_config.json", optional=True)
    config = read_object(folder / "config.json", optional=True)
    inner = config.get("text_config")
    return [generation, config, inner if isinstance(inner, dict) else {}]


def _ids(key: str, sources: list[Mapping[str, Any]], n_vocab: int) -> list[int]:
    """All ids that the files name under a key, each once."""
    found: dict[int, None] = {}
    for source in sources:
        value = source.get(key)
        for i in value if isinstance(value, list) else [value]:
            if type(i) is int and 0 <= i < n_vocab:
                found[i] = None
    return [*found]


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _adds(name: str, place: int, description: Mapping[str, Any], settings: Mapping[str, Any],
          where: object) -> bool | None:
    """Whether texts begin or end with a special token; None where no file says."""
    if isinstance(said := settings.get(f"add_{name}_token"), bool):
        return said
    if not description:
        return None
    for processor in _processors(description.get("post_processor")):
        if kind_of(processor) != "TemplateProcessing":
            continue
        try:
            added = processor["single"][place].get("SpecialToken", {}).get("id")
        except (AttributeError, LookupError, TypeError):
            raise TokenizerError("a post_processor that is not understood", where=where) from None
        if added is not None and added != _content(settings.get(f"{name}_token")):
            raise TokenizerError("unsupported post_processor", where=where,
                                 got=f"{added!r} around the text", wanted=f"{name}_token alone")
        return added is not None
    return False


def _processors(processor: Any) -> list[Any]:
    inner = processor.get("processors") if isinstance(processor, dict) else None
    return inner if isinstance(inner, list) else [processor]


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template, and those with names, from where any version of transformers has it."""
    template = settings.get("chat_template")
    if (path := folder / "chat_template.jinja").exists():
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"cannot read it: {error}", where=path) from None
    elif template is None:
        template = read_object(folder / "chat_template.json", optional=True).get("chat_template")
    rows = template if isinstance(template, list) else [{"name": "default", "template": template}]
    pairs = [(row.get("name"), row.get("template")) for row in rows if isinstance(row, dict)]
    texts = {name: text for name, text in pairs
             if isinstance(name, str) and isinstance(text, str)}
    keys: dict[str, Any] = {f"tokenizer.chat_template.{name}": text
                            for name, text in texts.items() if name != "default"}
    if keys:
        keys["tokenizer.chat_templates"] = [name for name in texts if name != "default"]
    if "default" in texts:
        keys["tokenizer.chat_template"] = texts["default"]
    return keys
