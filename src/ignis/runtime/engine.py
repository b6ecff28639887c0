"""The native engines: `graph` runs a whole step in one call, `imperative` op by op.

Both compute with the same kernels. `graph` runs the optimised graph with planned memory;
`imperative` runs the naive one, every op a call from Python, every value in a buffer of its own.
Their logits must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UsageError
from ignis.gguf import GGUFFile
from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.rope import RopeScaling
from ignis.graph.models import ModelConfig
from ignis.graph.passes.plan_memory import MemoryPlan, plan_memory
from ignis.kernels.lang import Kernel
from ignis.native.cache import ObjectCache
from ignis.native.library import Library
from ignis.runtime.kv_cache import KVCache
from ignis.runtime.launches import (
    Argument,
    Launch,
    Private,
    Surroundings,
    embedding_launch,
    lower,
    pack_launch,
)  # fmt: skip
from ignis.runtime.memory import Memory, thread_stride
from ignis.runtime.plan import ONE_ROW, CompiledPlan
from ignis.runtime.rope_tables import RopeTable
from ignis.runtime.schedule import Timetable, timetable_of
from ignis.runtime.step import StepBatch, StepTables
from ignis.runtime.team import WALKER, ThreadTeam
from ignis.runtime.weights import PackingPiece, WeightStore, packing_pieces
from ignis.target import Target

MAX_TOKENS = 512  # of one step; longer prompts take several
MAX_LOGITS = 64
_TOKEN_BUCKETS = (1, 16, 128, MAX_TOKENS)
_LOGIT_BUCKETS = (1, 8, MAX_LOGITS)
PACK_NBYTES = 4 << 20  # of the file that are packed before its pages are let go


class Engine(Protocol):
    """What runs a step: a batch of tokens in, logits f32 [R, V] out."""

    n_ctx: int
    n_slots: int

    def forward(self, batch: StepBatch) -> NDArray[np.float32]: ...

    def settle(self) -> None: ...

    def truncate(self, slot: int, n_positions: int) -> None: ...

    def close(self) -> None: ...


class EngineOptions(NamedTuple):
    """How an engine runs; what it computes does not depend on any of this."""

    n_threads: int
    n_ctx: int
    n_slots: int
    target: Target
    objects: ObjectCache
    reuse_memory: bool = True  # else every value has a place of its own


class _Bucket(NamedTuple):
    """A plan for steps of up to so many tokens and rows of logits, and its memory."""

    memory_plan: MemoryPlan
    arena: Memory
    private: Memory
    logits: Memory
    launches: tuple[Launch, ...]
    plan: CompiledPlan


class NativeEngine:
    """Runs a graph as compiled kernels."""

    fused = True  # one call a step, planned memory

    def __init__(
        self, file: GGUFFile, config: ModelConfig, graph: Graph, options: EngineOptions
    ) -> None:
        self.graph, self.config, self.options = graph, config, options
        self.n_ctx, self.n_slots = options.n_ctx, options.n_slots
        self._file = file
        self._embedding = file.tensors["token_embd.weight"].format.name
        self.cache = KVCache(
            config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim, self.n_ctx,
            self.n_slots, config.kv_type,
        )
        self.tables = StepTables(MAX_TOKENS, MAX_LOGITS)
        self.weights = WeightStore(file, graph)
        self._rope_tables: dict[tuple[Any, ...], RopeTable] = {}
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._plans: dict[tuple[int, int], MemoryPlan] = {}
        self._filled = [0] * self.n_slots
        kernels, scratch_nbytes = self._requirements()
        self.library = Library([WALKER, *kernels], options.target, options.objects)
        self.team = ThreadTeam(self.library, options.n_threads, scratch_nbytes)
        self._begin_packing()

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step and return the logits of its rows, f32 [R, V].

        Raises: UsageError for a batch that is too large or does not continue its sequences.
        """
        bucket, n_logits = self._ready(batch), len(batch.logit_rows)
        self._run(bucket)
        for slot, position in zip(batch.slots, batch.positions, strict=True):
            self._filled[slot] = position + 1
        n_vocab = self.config.n_vocab
        return bucket.logits.view(np.float32, n_logits * n_vocab).reshape(n_logits, n_vocab).copy()

    def settle(self) -> None:
        """Help with the packing of weights, which the first step waits for, until it is done."""
        self.team.finish()

    def truncate(self, slot: int, n_positions: int) -> None:
        """Forget what a slot holds behind its first `n_positions` positions."""
        self._filled[slot] = min(self._filled[slot], n_positions)
        self.cache.truncate(slot, n_positions)

    def close(self) -> None:
        """Stop the threads. The engine can't be used afterwards."""
        self.team.close()

    def plan(self, n_tokens: int, n_logits: int) -> MemoryPlan:
        """The memory of steps of up to that size; logits are outside the arena."""
        key = n_tokens, n_logits
        if key not in self._plans:
            reuse = self.fused and self.options.reuse_memory
            self._plans[key] = plan_memory(
                self.graph, *key, outputs_in_arena=False, reuse=reuse
            )
        return self._plans[key]

    def profile(self, batch: StepBatch) -> list[tuple[Launch, int, int]]:
        """Run a step; thread 0's cycles at work and at the barrier behind, for each launch."""
        bucket = self._ready(batch)
        times = np.zeros((len(bucket.launches), 2), np.int64)
        self.team.run(bucket.plan.records, times, self.cache.begin_step)
        return [
            (launch, work, wait)
            for launch, (work, wait) in zip(bucket.launches, times.tolist(), strict=True)
        ]

    def _ready(self, batch: StepBatch) -> _Bucket:
        """Check the batch, make room for it, and fill in the plan that it takes."""
        self._admit(batch)
        bucket = self._bucket(len(batch.ids), len(batch.logit_rows))
        bucket.plan.set_counts(self.tables.fill(batch))
        return bucket

    def _run(self, bucket: _Bucket) -> None:
        self.team.run(bucket.plan.records, prepare=self.cache.begin_step)

    def _admit(self, batch: StepBatch) -> None:
        """Check that the batch continues its sequences, and make room for it."""
        n_tokens, n_logits = len(batch.ids), len(batch.logit_rows)
        if not 1 <= n_tokens <= MAX_TOKENS or n_logits > MAX_LOGITS:
            raise UsageError("a step of this size can't be run",
                             got=f"{n_tokens} tokens and {n_logits} logits",
                             wanted=f"1 to {MAX_TOKENS} and up to {MAX_LOGITS}")  # fmt: skip
        bad = next((i for i in batch.ids if not 0 <= i < self.config.n_vocab), None)
        if bad is not None:
            raise UsageError("no such token", got=bad, wanted=f"0 to {self.config.n_vocab - 1}")
        if any(not 0 <= row < n_tokens for row in batch.logit_rows):
            raise UsageError("a row of logits outside the step", got=list(batch.logit_rows),
                             wanted=f"0 to {n_tokens - 1}")  # fmt: skip
        expected = dict(enumerate(self._filled))
        for slot, position in zip(batch.slots, batch.positions, strict=True):
            if expected.get(slot) != position:
                raise UsageError(f"the step does not continue slot {slot}", got=position,
                                 wanted=expected.get(slot, "a slot of this engine"))  # fmt: skip
            expected[slot] = position + 1
        for slot in set(batch.slots):
            self.cache.reserve(slot, expected[slot])
            for table in self._rope_tables.values():
                if table.n_filled < expected[slot]:
                    with self.team.float_mode():
                        table.reserve(expected[slot])

    def _bucket(self, n_tokens: int, n_logits: int) -> _Bucket:
        key = (
            next(size for size in _TOKEN_BUCKETS if size >= n_tokens),
            next(size for size in _LOGIT_BUCKETS if size >= n_logits),
        )
        if key not in self._buckets:
            with self.team.float_mode():  # numbers are rounded to f32 arguments
                self._buckets[key] = self._build(*key)
        return self._buckets[key]

    def _build(self, n_tokens: int, n_logits: int) -> _Bucket:
        memory_plan = self.plan(n_tokens, n_logits)
        arena, logits = Memory(memory_plan.nbytes), Memory(memory_plan.output_nbytes)
        stride = thread_stride(memory_plan.private_nbytes)
        private = Memory(stride * self.options.n_threads)

        def address(value: Value) -> Argument:
            offset = memory_plan.offsets.get(value)
            if offset is None:
                return logits.address
            if value in memory_plan.timing.private:
                return Private(offset)
            return arena.address + offset

        launches = tuple(self._launches(self._surroundings(n_tokens, n_logits, address)))
        timetable = timetable_of(self.graph, launches, one=n_tokens == 1 and n_logits == 1)
        plan = CompiledPlan(
            launches, self.library, self.options.n_threads, timetable, private.address, stride
        )
        return _Bucket(memory_plan, arena, private, logits, launches, plan)

    def _surroundings(self, n_tokens: int, n_logits: int, address: Any) -> Surroundings:
        return Surroundings(
            n_tokens, n_logits, address, self.weights.addresses, self.tables, self.cache,
            self._rope_table,
        )  # fmt: skip

    def _launches(self, at: Surroundings, ops: Iterable[Operation] | None = None) -> list[Launch]:
        (x,) = self.graph.inputs
        # The embedding is read by row, so always from the file.
        table = self._file.address("token_embd.weight")
        launches = [embedding_launch(table, self._embedding, x, at)]
        for op in self.graph.operations if ops is None else ops:
            launches += lower(op, at)
        return launches

    def _requirements(self) -> tuple[list[Kernel], int]:
        """All kernels that steps of any size need, and the scratch a thread needs for them."""
        launches: list[Launch] = []
        distinct = {self._kind(op): op for op in self.graph.operations}.values()
        for n in (1, 2):  # what a launch is depends on whether its own rows are one or more
            launches += self._launches(self._surroundings(n, n, lambda value: 0), distinct)
        kernels = {launch.kernel.symbol: launch.kernel for launch in launches}
        for tensor in self.weights.packed:
            kernel = self._packing(next(packing_pieces(tensor, PACK_NBYTES))).kernel
            kernels[kernel.symbol] = kernel
        return list(kernels.values()), max(launch.scratch_nbytes for launch in launches)

    def _kind(self, op: Operation) -> Hashable:
        """What kernels an op takes: layers repeat a few kinds, and need not be lowered for it."""
        operands = (value.type for value in op.operands)
        attributes = ((k, v) for k, v in sorted(op.attributes.items()) if k != "layer")
        return op.kind, *operands, *attributes

    def _rope_table(self, op: Operation) -> int:
        """The table of a rope op, shared by all that turn alike."""
        factors = op.operand("factors")
        scaling = RopeScaling.of(op.attributes)
        key = (op.attributes["base"], op.attributes["n_rot"], factors, scaling)
        if key not in self._rope_tables:
            array = None if factors is None else self._file.array(factors.name)
            base, n_rot = op.attributes["base"], op.attributes["n_rot"]
            assert isinstance(base, float) and isinstance(n_rot, int)
            self._rope_tables[key] = RopeTable(base, n_rot, array, self.n_ctx, scaling)
        return self._rope_tables[key].address

    def _begin_packing(self) -> None:
        """Let the team's workers fill the panels while Python goes on; see `settle`."""
        launches = [
            self._packing(piece)
            for tensor in self.weights.packed
            for piece in packing_pieces(tensor, PACK_NBYTES)
        ]
        timetable = Timetable.one_step(len(launches))
        plan = CompiledPlan(launches, self.library, self.options.n_threads, timetable)
        plan.set_counts(ONE_ROW)
        if launches:
            self.team.begin(plan.records, held=(plan, self.weights, self._file))

    def _packing(self, piece: PackingPiece) -> Launch:
        name = piece.tensor.name
        return pack_launch(piece, self._file.address(name), self.weights.addresses[name])


class ImperativeEngine(NativeEngine):
    """The same kernels called op by op from Python."""

    fused = False

    def _run(self, bucket: _Bucket) -> None:
        records = bucket.plan.records
        start = 0
        for index in range(1, len(records) + 1):
            if index == len(records) or bucket.launches[index].op is not bucket.launches[start].op:
                self.team.run(records[start:index], prepare=self.cache.begin_step)
                start = index


class ReferenceEngine:
    """The float64 interpreter of the naive graph: close to the others, not equal."""

    def __init__(self, file: GGUFFile, graph: Graph, n_ctx: int, n_slots: int = 1) -> None:
        from ignis.graph.ir.interpreter import ReferenceCache

        self.n_ctx, self.n_slots = n_ctx, n_slots
        self._file, self._graph = file, graph
        self._cache = ReferenceCache()
        self._arrays: dict[str, NDArray[np.float64]] = {}

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step in float64; logits are rounded to f32 [R, V] at the end."""
        from ignis.graph.ir.interpreter import interpret

        info = self._file.tensors["token_embd.weight"]
        row_nbytes = info.nbytes // info.shape[0]
        raw = self._file.data("token_embd.weight").reshape(info.shape[0], row_nbytes)
        x = info.format.decode(raw[list(batch.ids)]).astype(np.float64)
        (logits,) = interpret(
            self._graph, {self._graph.inputs[0].name: x}, self._weight, self._cache,
            np.asarray(batch.positions), np.asarray(batch.slots), np.asarray(batch.logit_rows),
        )  # fmt: skip
        return logits.astype(np.float32)

    def settle(self) -> None:
        """Nothing was begun."""

    def truncate(self, slot: int, n_positions: int) -> None:
        """Positions are overwritten as sequences are fed again; nothing is to be done."""

    def close(self) -> None:
        self._arrays.clear()

    def _weight(self, name: str) -> NDArray[np.float64]:
        if name not in self._arrays:
            self._arrays[name] = self._file.array(name).astype(np.float64)
        return self._arrays[name]
