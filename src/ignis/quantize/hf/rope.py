"""Rope: how a checkpoint stretches it, as GGUF keys and tensors of frequency factors.

    rope_theta + rope_scaling            transformers 4, and most files
    rope_parameters                      transformers 5, all in one
    rope_parameters by kind of layer     the same where local layers turn by a base of their own
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UnsupportedModelError
from ignis.quantize.hf.config import Section

Factors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rope:
    """`keys` without the architecture's name; `factors` by tensor name, float32 [n_rot / 2]."""

    keys: Mapping[str, int | float | str]
    factors: Mapping[str, Factors] = field(default_factory=dict)


def read_rope(config: Section, head_dim: int, n_ctx: int) -> Rope:
    """What config.json says of rope; UnsupportedModelError for ways to stretch that are unknown."""
    parameters = config.section("rope_parameters")
    whole = _merged(config, parameters and (parameters.section("full_attention") or parameters))
    local = parameters.section("sliding_attention") if parameters else None
    n_rot = int(head_dim * whole.positive("partial_rotary_factor", 1.0))
    base = whole.positive("rope_theta")
    keys: dict[str, int | float | str] = {"rope.freq_base": base, "rope.dimension_count": n_rot}
    if local is not None:
        local.refuse("rope_type", "default")
        keys["rope.freq_base_swa"] = local.positive("rope_theta")
    elif "rope_local_base_freq" in config:
        keys["rope.freq_base_swa"] = config.positive("rope_local_base_freq")
    scaling = _scaling(whole, base, n_rot, n_ctx)
    return Rope({**keys, **scaling.keys}, scaling.factors)


def _merged(config: Section, parameters: Section | None) -> Section:
    """One section of all that is said, the newer names first."""
    names = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    values = {name: config.get(name) for name in names}
    for section in (config.section("rope_scaling"), parameters):
        values |= {} if section is None else section.values
    return Section(config.where, values)


def _scaling(rope: Section, base: float, n_rot: int, n_ctx: int) -> Rope:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return Rope({})
    if kind == "linear":
        return Rope({"rope.scaling.type": "linear", "rope.scaling.factor": rope.positive("factor")})
    if kind == "llama3":
        return Rope({}, {"rope_freqs.weight": _llama3_factors(rope, base, n_rot)})
    if kind == "yarn":
        return Rope(_yarn_keys(rope, n_ctx))
    if kind in ("longrope", "su"):
        return _longrope(rope, n_rot, n_ctx)
    raise UnsupportedModelError("unsupported way to stretch rope", where=rope.where, got=repr(kind),
                                wanted="default, linear, llama3, yarn or longrope")


def _llama3_factors(rope: Section, base: float, n_rot: int) -> Factors:
    """Long waves are stretched by `factor`, short ones not, those between in part."""
    factor = rope.positive("factor")
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    n_ctx_before = rope.count("original_max_position_embeddings")
    if low >= high:
        raise rope.bad("high_freq_factor", f"more than low_freq_factor, {low}")

    def of(pair: int) -> float:
        wave = 2 * math.pi * math.pow(base, 2 * pair / n_rot)
        kept = min(1.0, max(0.0, (n_ctx_before / wave - low) / (high - low)))
        return 1 / ((1 - kept) / factor + kept)

    return np.array([of(pair) for pair in range(n_rot // 2)], np.float32)


def _yarn_keys(rope: Section, n_ctx: int) -> dict[str, int | float | str]:
    for key in ("mscale", "mscale_all_dim"):
        rope.refuse(key)
    rope.refuse("truncate", True)
    factor = rope.positive("factor")
    keys: dict[str, int | float | str] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length":
            rope.count("original_max_position_embeddings", n_ctx),
        "rope.scaling.yarn_beta_fast": rope.positive("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": rope.positive("beta_slow", 1.0),
    }
    if "attention_factor" in rope:     # GGUF has it relative to the paper's
        paper = 1 + math.log(factor) / 10 if factor > 1 else 1.0
        keys["rope.scaling.attn_factor"] = rope.positive("attention_factor") / paper
    return keys


def _longrope(rope: Section, n_rot: int, n_ctx: int) -> Rope:
    """Two sets of factors, and the magnitude of the rotated values (arXiv 2402.13753)."""
    n_ctx_before = rope.count("original_max_position_embeddings", n_ctx)
    if n_ctx_before == 1:       # its logarithm divides
        raise rope.bad("original_max_position_embeddings", "2 or more")
    factor = rope.positive("factor", n_ctx / n_ctx_before)
    grown = math.sqrt(1 + math.log(factor) / math.log(n_ctx_before)) if factor > 1 else 1.0
    keys: dict[str, int | float | str] = {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": n_ctx_before,
        "rope.scaling.attn_factor": rope.positive("attention_factor", grown),
    }
    return Rope(keys, {
        f"rope_factors_{name}.weight": np.array(rope.numbers(f"{name}_factor", n_rot // 2),
                                                np.float32)
        for name in ("short", "long")
    })  # fmt: skip
