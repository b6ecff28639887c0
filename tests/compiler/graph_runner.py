"""Runs any graph natively, step by step, in memory that shows what a kernel must not touch.

Activations, scratch and cache pages are filled with NaNs before they are written, and between all
buffers lie red zones that must stay as they are: a read of what was never written spoils the bits,
a write beside its place is seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ignis.gguf import BLOCKS
from ignis.graph.ir import Graph, Operation, Value, verify
from ignis.graph.ir.rope import RopeScaling
from ignis.graph.ir.types import PANELS, align
from ignis.graph.passes import run_pipeline
from ignis.graph.passes.plan_memory import Timing, plan_memory
from ignis.kernels.lang import Kernel
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.native.library import Library
from ignis.runtime.kv_cache import KVCache
from ignis.runtime.launches import (
    Argument,
    Launch,
    Private,
    Surroundings,
    lower,
    pack_launch,
)  # fmt: skip
from ignis.runtime.memory import Memory
from ignis.runtime.plan import CompiledPlan
from ignis.runtime.rope_tables import RopeTable
from ignis.runtime.schedule import timetable_of, verify_schedule
from ignis.runtime.step import StepBatch, StepTables
from ignis.runtime.team import WALKER, ThreadTeam
from ignis.runtime.weights import packed_tensors, packing_pieces
from ignis.target import Target

Array = NDArray[Any]
ZONE = 256  # bytes around a buffer
RED = 0xA5
POISON = 0xFF  # a NaN in f32, f16 and bf16
SCRATCH_NBYTES = 1 << 20
N_CTX, N_SLOTS, MAX_ROWS = 512, 3, 64


@dataclass(frozen=True, slots=True)
class Setting:
    """How a graph is compiled and run; none of it may change a bit."""

    disabled: tuple[str, ...] = ()
    n_threads: int = 1
    level: str = "host"
    plain: bool = False  # a barrier behind every launch, every value in red zones of its own
    bucket: int = 0  # plan for this many tokens and rows more than there are


class Kernels:
    """Machine code of kernels as they are asked for, for one target; passes for a `Library`."""

    def __init__(self, target: Target, objects: ObjectCache) -> None:
        self._target, self._objects = target, objects
        self._walker = Library([WALKER], target, objects)
        self._libraries: dict[str, Library] = {}

    def address(self, function: Kernel | str) -> int:
        if isinstance(function, str):
            return self._walker.address(function)
        if function.symbol not in self._libraries:
            library = Library([function], self._target, self._objects)
            self._libraries[function.symbol] = library
        return self._libraries[function.symbol].address(function)


def target_of(level: str) -> Target:
    host = host_target()
    return host if level == "host" else Target.level(level, host.triple.split("-", 1)[1])


@cache
def kernels(level: str, folder: Path) -> Kernels:
    return Kernels(target_of(level), ObjectCache(folder))


@cache
def team(level: str, folder: Path, n_threads: int) -> ThreadTeam:
    return ThreadTeam(cast(Library, kernels(level, folder)), n_threads, SCRATCH_NBYTES)


class Zoned:
    """A buffer of `nbytes` between red zones, filled with poison."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = Memory(align(nbytes) + 2 * ZONE)
        self._memory.bytes[:] = RED
        self.bytes = self._memory.bytes[ZONE : ZONE + nbytes]
        self.address = self._memory.address + ZONE
        self.poison()

    def poison(self) -> None:
        self.bytes[:] = POISON

    def check(self, what: object) -> None:
        """Raise AssertionError where something beside the buffer was written."""
        before, after = self._memory.bytes[:ZONE], self._memory.bytes[ZONE + self.nbytes :]
        assert (before == RED).all(), f"{what}: written before its buffer"
        assert (after == RED).all(), f"{what}: written behind its buffer"

    def floats(self, rows: int, width: int) -> Array:
        return self.bytes[: 4 * rows * width].view(np.float32).reshape(rows, width)


class GraphRunner:
    """A graph compiled under a setting, with its weights and its KV cache."""

    def __init__(
        self, graph: Graph, weights: Mapping[str, Array], setting: Setting, folder: Path
    ) -> None:
        self.setting = setting
        self.graph, _ = run_pipeline(graph, setting.disabled, check=True)
        verify(self.graph, legalized=True)
        self.kernels = kernels(setting.level, folder)
        self.team = team(setting.level, folder, setting.n_threads)
        self.cache = _cache_of(graph)
        self.tables = StepTables(MAX_ROWS, MAX_ROWS)
        self._ropes: dict[object, RopeTable] = {}
        self._weights = weights
        self._raw = {name: self._placed(value) for name, value in self.graph.weights.items()}
        self._addresses = {name: zoned.address for name, zoned in self._raw.items()}
        self.values: dict[Value, Zoned] = {}  # of the last step, in a plain setting

    def step(self, inputs: Mapping[str, Array], batch: StepBatch) -> dict[Value, Array]:
        """Run one step; the outputs by value, f32 or A8 blocks as they lie."""
        sizes = len(batch.ids), len(batch.logit_rows)
        planned = sizes[0] + self.setting.bucket, max(sizes[1], 1) + self.setting.bucket
        if self.setting.bucket == 0:
            planned = sizes[0], max(sizes[1], 1)
        for slot, position in zip(batch.slots, batch.positions, strict=True):
            self.cache.reserve(slot, position + 1)
        self.cache.begin_step()
        plan, memory = self._compiled(*planned)
        for name, rows in inputs.items():
            value = next(v for v in self.graph.inputs if v.name == name)
            place = memory.of(value)
            place[: rows.nbytes] = rows.astype(np.float32).reshape(-1).view(np.uint8)
        plan.set_counts(self.tables.fill(batch))
        scratch = self.team._scratch.bytes.reshape(-1)
        scratch[:] = POISON
        self.team.run(plan.records)
        memory.check()
        for name, zoned in self._raw.items():
            zoned.check(f"@{name}")
        self.values = memory.buffers
        return {
            value: memory.of(value)[: value.type.nbytes(*sizes)].copy()
            for value in self.graph.outputs
        }

    def _compiled(self, n_tokens: int, n_logits: int) -> tuple[CompiledPlan, _StepMemory]:
        graph, plain = self.graph, self.setting.plain
        one = n_tokens == 1 and n_logits == 1
        timing = Timing.of(graph, one=one)
        # What the test feeds lies in one place: no embedding is looked up by every thread.
        timing = timing._replace(private=timing.private.difference(graph.inputs))
        reuse = "plan_memory" not in self.setting.disabled and not plain
        planned = plan_memory(
            graph, n_tokens, n_logits, outputs_in_arena=False, reuse=reuse, timing=timing
        )
        memory = _StepMemory(planned, self.setting.n_threads, apart=plain)
        final = self._launches(n_tokens, n_logits, memory.address)
        assert max((x.scratch_nbytes for x in final), default=0) <= SCRATCH_NBYTES
        timetable = None if plain else timetable_of(graph, final, one=one)
        if timetable is not None:
            verify_schedule(final, timetable, frozenset(graph.inputs))
        plan = CompiledPlan(
            final, cast(Library, self.kernels), self.setting.n_threads, timetable,
            memory.private_address, memory.stride,
        )  # fmt: skip
        return plan, memory

    def _launches(self, n_tokens: int, n_logits: int, address: Any) -> list[Launch]:
        at = Surroundings(
            n_tokens, n_logits, address, self._addresses, self.tables, self.cache, self._rope_table
        )
        return [launch for op in self.graph.operations for launch in lower(op, at)]

    def _rope_table(self, op: Operation) -> int:
        factors = op.operand("factors")
        scaling = RopeScaling.of(op.attributes)
        key = op.attributes["base"], op.attributes["n_rot"], factors, scaling
        if key not in self._ropes:
            numbers = None if factors is None else self._weights[factors.name].view(np.float32)
            base, n_rot = float(key[0]), int(key[1])  # type: ignore[arg-type]
            table = RopeTable(base, n_rot, numbers, N_CTX, scaling)
            table.reserve(N_CTX)
            self._ropes[key] = table
        return self._ropes[key].address

    def _placed(self, value: Value) -> Zoned:
        """The weight's bytes as in a file, or its panels, between red zones."""
        raw = self._weights[value.name].reshape(-1).view(np.uint8)
        rows = Zoned(raw.nbytes)
        rows.bytes[:] = raw
        if value.type.layout != PANELS:
            return rows
        (tensor,) = (t for t in packed_tensors(self.graph.weights.values()) if t.name == value.name)
        panels = Zoned(tensor.nbytes)
        pieces = packing_pieces(tensor, 1 << 30)
        launches = [pack_launch(piece, rows.address, panels.address) for piece in pieces]
        plan = CompiledPlan(launches, cast(Library, self.kernels), self.setting.n_threads)
        plan.set_counts({"T": 1, "R": 1, "S": 1})
        self.team.run(plan.records)
        panels.check(f"panels of {value}")
        return panels


class _StepMemory:
    """The arena and each output's buffer; `apart` gives every value red zones of its own."""

    def __init__(self, plan: Any, n_threads: int, *, apart: bool) -> None:
        sizes = (plan.n_tokens, plan.n_logits)
        self._plan = plan
        self._arena, self._private = Zoned(plan.nbytes), plan.timing.private
        self.stride = align(plan.private_nbytes) + ZONE
        self._own = Zoned(self.stride * n_threads)
        self.private_address = self._own.address
        self.buffers = {
            value: Zoned(value.type.nbytes(*sizes))
            for value in plan.graph.values
            if apart or value not in plan.offsets
        }

    def address(self, value: Value) -> Argument:
        if value in self.buffers:
            return self.buffers[value].address
        offset = self._plan.offsets[value]
        return Private(offset) if value in self._private else self._arena.address + offset

    def of(self, value: Value) -> Array:
        """The bytes of a value that all threads share."""
        if value in self.buffers:
            return self.buffers[value].bytes
        return self._arena.bytes[self._plan.offsets[value] :]

    def check(self) -> None:
        for value, zoned in self.buffers.items():
            zoned.check(value)
        self._arena.check("arena")
        self._own.check("private memory")


def _cache_of(graph: Graph) -> KVCache:
    """A cache for the graph's attention, its pages poisoned."""
    writers = [op for op in graph.operations if op.effect is not None]
    layers = [int(op.attributes["layer"]) for op in writers]  # type: ignore[arg-type]
    heads, kv_type = [1, 1, 16], "f16"
    if writers:
        c = int(writers[0].attributes["head_dim"])  # type: ignore[arg-type]
        kv_type = str(writers[0].attributes.get("kv_type", kv_type))
        heads = [*(_width(writers[0].operand(name)) // c for name in ("q", "k")), c]
    cache = KVCache(max(layers, default=0) + 1, *heads, n_ctx=N_CTX, n_slots=N_SLOTS,
                    kv_type=kv_type)  # fmt: skip
    cache._pool.bytes[:] = POISON
    return cache


def _width(value: Value | None) -> int:
    assert value is not None
    return int(value.type.shape[1])


def encode(weights: Mapping[str, Array], graph: Graph) -> dict[str, Array]:
    """Each weight's float32 numbers in the format of its type, as bytes."""
    encoded = {}
    for name, value in graph.weights.items():
        numbers = np.ascontiguousarray(weights[name], np.float32)
        encoded[name] = np.ascontiguousarray(BLOCKS[value.type.dtype].encode(numbers))
    return encoded


def decoded(encoded: Mapping[str, Array], graph: Graph) -> dict[str, Array]:
    """What the bytes stand for, as float64 arrays of the weights' shapes."""
    return {
        name: BLOCKS[value.type.dtype].decode(encoded[name]).reshape(value.type.shape).astype(float)
        for name, value in graph.weights.items()
    }


def run_chunks(
    runner: GraphRunner, inputs: Mapping[str, Array], tokens: Sequence[tuple[int, int]],
    wanted: Collection[int], chunks: Sequence[int],
) -> list[Array]:
    """Outputs of all tokens, (slot, position) each, fed in steps of the given sizes.

    An output of T rows has one for each token, one of R rows those of the `wanted` tokens.
    """
    parts: list[list[Array]] = [[] for _ in runner.graph.outputs]
    start = 0
    for size in chunks:
        here = range(start, start + size)
        rows = [i - start for i in here if i in wanted]
        slots, positions = zip(*(tokens[i] for i in here), strict=True)
        batch = StepBatch([0] * size, slots, positions, rows)
        found = runner.step({name: x[start : start + size] for name, x in inputs.items()}, batch)
        for part, value in zip(parts, runner.graph.outputs, strict=True):
            shape = value.type.sizes(size, len(rows))
            part.append(found[value].view(np.float32).reshape(shape))
        start += size
    return [np.concatenate(part) for part in parts]
