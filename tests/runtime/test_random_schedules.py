"""Schedules of random models: barriers where they must be, and nowhere else.

What would be broken: a shape that nobody thought of races, or waits for nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ignis.errors import GraphError
from ignis.runtime.schedule import Timetable, timetable_of, verify_schedule
from tests.random_models import random_models
from tests.runtime.engines import engine

BUCKETS = [(n_tokens, n_logits) for n_tokens in (1, 16, 128, 512) for n_logits in (1, 8, 64)]


def test_random_models_in_every_bucket(tmp_path: Path) -> None:
    """Every schedule is sound; without any one of its barriers it is not."""
    for _, path in random_models(tmp_path, 5, seed=20):
        with engine(path, tmp_path, n_threads=2) as runner:
            for bucket in BUCKETS:
                launches = runner._launches(runner._surroundings(*bucket, lambda value: 0))
                plan = timetable_of(runner.graph, launches, one=bucket == (1, 1))
                assert plan.barrier_after(len(launches) - 1)
                verify_schedule(launches, plan)
                for gone in range(1, plan.n_steps):
                    fewer = tuple(step - (step >= gone) for step in plan.step)
                    with pytest.raises(GraphError, match="rule S3"):
                        verify_schedule(launches, Timetable(plan.repeated, fewer))


def test_a_decode_layer_takes_five_steps(tmp_path: Path) -> None:
    """Whatever its heads, biases and formats; the logits end the plan."""
    for model, path in random_models(tmp_path, 3, seed=40):
        with engine(path, tmp_path, n_threads=2) as runner:
            schedule = runner.graph.schedule
            assert schedule is not None
            assert schedule.n_barriers(one=True) == 5 * model.n_layers + 1
