"""Run a model and set the time of each step against the machine's ceilings."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from ignis.compile import compile_model
from ignis.gguf import open_gguf
from ignis.runtime.ceilings import higher, measure
from ignis.runtime.engine import NativeEngine
from ignis.runtime.profile import PhaseProfile, launch_work, profile_engine
from ignis.runtime.work import Ceilings
from ignis.settings import Settings


def profile_model(
    path: Path, settings: Settings, *, n_threads: int | None = None, n_ctx: int | None = None,
    weights: str = "auto", disabled: Collection[str] = frozenset(), n_tokens: int = 512,
) -> dict[str, Any]:
    """Ceilings, and the phases "prefill" and "decode", as plain data; times in seconds."""
    with open_gguf(path) as file:
        engine, config, _ = compile_model(
            file, settings, n_threads=n_threads, n_ctx=n_ctx, weights=weights,
            disabled_passes=disabled,
        )  # fmt: skip
        assert isinstance(engine, NativeEngine)
        try:
            engine.settle()  # or packing would be measured, too
            before = measure(engine.options.n_threads)
            phases = profile_engine(engine, min(n_tokens, config.n_ctx_train - 1, engine.n_ctx - 1))
            ceilings = higher(before, measure(engine.options.n_threads))
        finally:
            engine.close()
    return {
        "threads": engine.options.n_threads,
        "ceilings": {
            "bandwidth_gb_s": ceilings.bandwidth_gb_s, "int8_gmac_s": ceilings.int8_gmac_s,
            "f32_gmac_s": ceilings.f32_gmac_s,
        },
        "phases": [_phase(phase, ceilings) for phase in phases],
    }  # fmt: skip


def _phase(phase: PhaseProfile, ceilings: Ceilings) -> dict[str, Any]:
    return {
        "name": phase.name, "n_tokens": phase.size.n_tokens, "n_past": phase.size.n_past,
        "runs": phase.n_runs, "seconds": phase.seconds,
        "launches": [
            {"seconds": timed.seconds, "wait": timed.wait_seconds,
             "least": launch_work(timed.launch, phase.size).least_seconds(ceilings)}
            for timed in phase.launches
        ],
        "groups": [
            {"label": g.label, "kernel": g.kernel, "launches": g.n_launches, "seconds": g.seconds,
             "least": g.work.least_seconds(ceilings), "nbytes": g.work.nbytes, "macs": g.work.macs,
             "int8": g.work.int8_macs > 0}
            for g in phase.groups
        ],
    }  # fmt: skip
