"""Schedules of random models: barriers where they must be, and nowhere else.

What would be broken: a shape that nobody thought of races, or waits for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path

import pytest

from ignis.errors import GraphError
from ignis.kernels.elementwise import add
from ignis.runtime.launches import Launch
from ignis.runtime.schedule import Schedule, schedule, verify_schedule
from tests.random_models import random_models
from tests.runtime.engines import engine

BUCKETS = [(n_tokens, n_logits) for n_tokens in (1, 16, 128, 512) for n_logits in (1, 8, 64)]


def test_random_models_in_every_bucket(tmp_path: Path) -> None:
    """Every schedule is sound; without any one of its barriers it is not."""
    for _, path in random_models(tmp_path, 5, seed=20):
        with engine(path, tmp_path, n_threads=2) as runner:
            for bucket in BUCKETS:
                launches = runner._launches(runner._surroundings(*bucket, lambda value: 0))
                plan, _ = runner.plan(*bucket)
                assert plan is not None and plan.barrier_after(len(launches) - 1)
                verify_schedule(launches, plan)
                for gone in range(1, plan.n_steps):
                    fewer = tuple(step - (step >= gone) for step in plan.step)
                    with pytest.raises(GraphError, match="rule S3"):
                        verify_schedule(launches, Schedule(plan.repeated, fewer))


def test_a_decode_layer_takes_five_steps(tmp_path: Path) -> None:
    """Whatever its heads, biases and formats; the logits end the plan."""
    for model, path in random_models(tmp_path, 3, seed=40):
        with engine(path, tmp_path, n_threads=2) as runner:
            plan, _ = runner.plan(1, 1)
            assert plan is not None and plan.n_steps == 5 * model.n_layers + 1


def launch(
    reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = (), *, by_row: bool = False,
    per: str = "T",
) -> Launch:  # fmt: skip
    """A launch that the scheduler can place; nothing runs it."""
    return Launch(None, add(), {}, units=1 if by_row else 8, per=per, shared=not by_row,
                  reads=frozenset(reads), writes=frozenset(writes))  # fmt: skip


def test_what_nobody_reads_stands_side_by_side() -> None:
    q, k, attend = launch(writes="q"), launch(writes="k"), launch("qk", "y")
    assert schedule([q, k, attend], single=False).step == (0, 0, 1)


def test_rows_follow_rows_of_the_same_kind() -> None:
    """Norm and quantize of a prompt, divided by token alike; rows of logits are divided anew."""
    norm, quantize = launch("x", "n", by_row=True), launch("n", "a", by_row=True)
    launches = [launch(writes="x"), norm, quantize, launch("a", "y")]
    assert schedule(launches, single=False).step == (0, 1, 1, 2)
    rows_of_logits = launch("n", "l", by_row=True, per="R")
    assert schedule([norm, rows_of_logits], single=False).step == (0, 1)


def test_one_token_is_repeated_in_every_thread() -> None:
    launches = [launch("x", "n", by_row=True), launch("n", "y")]
    assert schedule(launches, single=True) == Schedule((True, False), (0, 0))
    assert schedule(launches, single=False) == Schedule((False, False), (0, 1))
