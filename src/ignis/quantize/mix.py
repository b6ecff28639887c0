"""File types as users know them: which tensor of a model gets which format.

`q4_k_m` is not a format but a mix: most matrices in Q4_K, those that suffer most from rounding
(attn_v, ffn_down in some layers, the output) in a better one. The choices are llama.cpp's without
an importance matrix, so that a file called Q4_K_M is the same mix whoever made it; the tests hold
them against what llama.cpp chose.

    wanted_format("blk.3.attn_v.weight", (1024, 4096), find_mix("q4_k_m"), facts)  ->  'q6_k'

Vectors and the weights of a router are F32 in every mix. A row that a format's blocks do not divide
falls back to one with smaller blocks, and to F16 if those do not divide it either.

Source: llama.cpp's `llama-quant.cpp` (facts only), as of version 0.25 of ggml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from ignis.errors import UsageError
from ignis.gguf import BLOCKS

QUANTIZATION_VERSION = 2
"""`general.quantization_version`: the layout of ggml's blocks since May 2023."""

_LAYERS_OF_70B = 80


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the choices depend on, besides a tensor's name and shape.

    `group` is the number of query heads that share a key head; `tied` says that the output is
    the embedding.
    """

    n_layers: int
    group: int = 1
    n_experts: int = 0
    tied: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix' layer in its model."""

    layer: int
    facts: ModelFacts

    @property
    def needs_more_bits(self) -> bool:
        """The first and the last eighth of the layers, and every third between."""
        n, eighth = self.facts.n_layers, self.facts.n_layers // 8
        between = (self.layer - eighth) % 3 == 2
        return self.layer < eighth or self.layer >= 7 * n // 8 or between

    def is_in_first(self, part: int) -> bool:
        """Whether the layer is one of the first 1 / `part` of all."""
        return self.layer < self.facts.n_layers // part


Choice: TypeAlias = "Callable[[Place], str | None]"
"""The format of a matrix at a place; None for the mix's own."""


def _always(name: str) -> Choice:
    return lambda place: name


def _more_bits(name: str) -> Choice:
    return lambda place: name if place.needs_more_bits else None


def _first_layers(n: int, name: str, then: str | None = None) -> Choice:
    return lambda place: name if place.layer < n else then


def _first_part(part: int, name: str, then: str | None = None) -> Choice:
    return lambda place: name if place.is_in_first(part) else then


def _grouped(name: str, otherwise: str | None = None) -> Choice:
    """Where four query heads or more share a value head, it is small and worth more bits."""
    return lambda place: name if place.facts.group >= 4 else otherwise


@dataclass(frozen=True, slots=True)
class Mix:
    """A file type.

    file_type       `general.file_type`, llama.cpp's number for it
    format          of all matrices that nothing below speaks of
    output          of the output matrix, and of the embedding where that is the output
    embedding       of an embedding that is not the output; None: `format`
    choices         by the role of a matrix: attn_v, ffn_down, attn_output
    eight_experts   of attn_output in models of eight experts
    """

    file_type: int
    format: str
    output: str | None = None
    embedding: str | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    eight_experts: str | None = None


def _float(file_type: int, name: str) -> Mix:
    return Mix(file_type, name)


def _block(file_type: int, name: str, *, eight_experts: str | None = None,
           embedding: str | None = None, **choices: Choice) -> Mix:
    return Mix(file_type, name, "q6_k", embedding, MappingProxyType(choices), eight_experts)


MIXES: Mapping[str, Mix] = MappingProxyType({
    "f32": _float(0, "f32"),
    "f16": _float(1, "f16"),
    "bf16": _float(32, "bf16"),
    "q8_0": Mix(7, "q8_0", "q8_0"),
    "q6_k": _block(18, "q6_k"),
    "q5_k_m": _block(17, "q5_k", attn_v=_more_bits("q6_k"), ffn_down=_more_bits("q6_k")),
    "q5_k_s": _block(16, "q5_k"),
    "q5_1": _block(9, "q5_1"),
    "q5_0": _block(8, "q5_0"),
    "q4_k_m": _block(15, "q4_k", attn_v=_more_bits("q6_k"), ffn_down=_more_bits("q6_k"),
                     eight_experts="q5_k"),
    "q4_k_s": _block(14, "q4_k", attn_v=_first_layers(4, "q5_k"), ffn_down=_first_part(8, "q5_k"),
                     eight_experts="q5_k"),
    "q4_1": _block(3, "q4_1"),
    "q4_0": _block(2, "q4_0"),
    "iq4_nl": _block(25, "iq4_nl", attn_v=_grouped("q5_k"), ffn_down=_first_part(8, "q5_k"),
                     eight_experts="q5_k"),
    "iq4_xs": _block(30, "iq4_xs", attn_v=_grouped("q5_k"), ffn_down=_first_part(8, "q5_k"),
                     eight_experts="q5_k"),
    "q3_k_l": _block(13, "q3_k", attn_v=_always("q5_k"), ffn_down=_always("q5_k"),
                     attn_output=_always("q5_k")),
    "q3_k_m": _block(12, "q3_k", attn_v=_first_layers(2, "q5_k", "q4_k"),
                     ffn_down=_first_part(16, "q5_k", "q4_k"), attn_output=_always("q4_k"),
                     eight_experts="q5_k"),
    "q3_k_s": _block(11, "q3_k", eight_experts="q5_k"),
    "q2_k": _block(10, "q2_k", attn_v=_grouped("q4_k", "q3_k"), ffn_down=_always("q3_k"),
                   attn_output=_always("q3_k"), eight_experts="q5_k"),
    "tq2_0": _block(37, "tq2_0", embedding="q4_k"),
    "tq1_0": _block(36, "tq1_0", embedding="q4_k"),
    "mxfp4": Mix(38, "mxfp4", "q8_0", "q8_0"),
})  # fmt: skip
"""By the name that `--type` takes, the largest first.

`mxfp4` is llama.cpp's MXFP4_MOE where there are experts; it makes the matrices of other models
MXFP4 too, which llama.cpp does not.
"""

ALIASES: Mapping[str, str] = MappingProxyType(
    {"q5_k": "q5_k_m", "q4_k": "q4_k_m", "q3_k": "q3_k_m"}
)

_FALLBACKS: Mapping[str, str] = MappingProxyType({
    "q2_k": "q4_0", "q3_k": "q4_0", "tq1_0": "q4_0", "tq2_0": "q4_0", "q4_k": "q5_0",
    "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl",
})  # fmt: skip
_ROLES: Mapping[str, str] = MappingProxyType({
    "attn_qkv.weight": "attn_v", "attn_v.weight": "attn_v", "attn_k.weight": "attn_k",
    "attn_output.weight": "attn_output", "ffn_down": "ffn_down",
})  # fmt: skip
"""Parts of names. A matrix that holds q, k and v counts as v, the most sensitive of them."""

_KEPT = ("_norm.weight", "ffn_gate_inp")
_LAYER = re.compile(r"blk\.(\d+)\.")


def find_mix(name: str) -> Mix:
    """The file type of that name, in any case; UsageError lists those there are."""
    key = name.lower()
    mix = MIXES.get(ALIASES.get(key, key))
    if mix is None:
        raise UsageError("unknown file type", where="--type", got=repr(name),
                         wanted=" or ".join(MIXES))
    return mix


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor takes a mix's format: matrices do, but not those of norms and routers."""
    return (len(shape) > 1 and name.endswith(".weight")
            and not any(part in name for part in _KEPT))


def wanted_format(name: str, shape: tuple[int, ...], mix: Mix, facts: ModelFacts, *,
                  pure: bool = False) -> str:
    """The format of a tensor in a file of type `mix`, were its rows long enough.

    `pure` gives every matrix the same one.
    """
    if not is_quantized(name, shape):
        return "f32"
    if mix.output is None or pure:
        return mix.format
    return _choose(name, shape, mix, facts)


def fallback(name: str, k: int) -> str:
    """The format itself if its blocks divide rows of `k` values, or the one to take instead."""
    if k % BLOCKS[name].block_size:
        name = _FALLBACKS.get(name, "f16")
    return name if k % BLOCKS[name].block_size == 0 else "f16"


def _choose(name: str, shape: tuple[int, ...], mix: Mix, facts: ModelFacts) -> str:
    is_embedding = name == "token_embd.weight"
    if name == "output.weight" or (is_embedding and facts.tied):
        assert mix.output is not None
        return "q8_0" if shape[-1] % BLOCKS[mix.format].block_size else mix.output
    if is_embedding:
        return mix.embedding or mix.format
    if mix.format == "mxfp4" and facts.n_experts and len(shape) == 2:
        return "q8_0"   # the experts are nearly all of such a model
    role = next((role for part, role in _ROLES.items() if part in name), None)
    match = _LAYER.match(name)
    if role is None or match is None:
        return mix.format
    return _of_role(role, mix, Place(int(match[1]), facts)) or mix.format


def _of_role(role: str, mix: Mix, place: Place) -> str | None:
    facts = place.facts
    if facts.n_experts == 8:    # attention is a small part of such a model
        if role in ("attn_v", "attn_k"):
            return "q8_0"
        if role == "attn_output":
            return mix.eight_experts
    chosen = mix.choices[role](place) if role in mix.choices else None
    is_70b = facts.n_layers == _LAYERS_OF_70B and facts.group > 1
    if role == "attn_v" and is_70b and (chosen or mix.format) in ("q3_k", "q4_k"):
        return "q5_k"
    return chosen
