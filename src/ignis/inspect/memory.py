"""How much memory a run will take, counted from the plans that it will run by.

Two kinds of bytes are told apart. What is *mapped* stands in the model's file: the system can
drop it and read it again, so a run is only slow without it. The rest is the process's own, and
without it there is no run. The cache is counted full; the system commits it as it fills.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, fields

from ignis.gguf import GGUFFile
from ignis.graph.ir.rope import RopeScaling
from ignis.inspect.compilation import BUCKETS, Compilation
from ignis.kernels import attention_split
from ignis.kernels.kv_pages import PAGE
from ignis.runtime.kv_cache import KVCache
from ignis.runtime.memory import thread_stride
from ignis.runtime.weights import packed_tensors

MAX_PROMPT = max(n_tokens for n_tokens, _ in BUCKETS)  # tokens of one step
PROGRAM_NBYTES = 96 << 20
"""Python, NumPy, LLVM and our own modules and kernels, as measured; two thirds are files of theirs
that the system shares between processes."""
COMPILING_NBYTES = 36 << 20
"""What LLVM takes besides when kernels are compiled that the object cache has not: as measured."""
CHAT_NBYTES = 22 << 20
"""The process that renders chat templates: as measured."""

_TOKEN_NBYTES = 80  # of a tokenizer's tables, for each token and each merge
_EMBEDDING_NBYTES = 16 << 20  # of an embedding that is only read by row: what texts touch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Bytes that a run takes at most, with kernels from the cache and prompts in steps of 512."""

    mapped_weights: int
    vocabulary_file: int  # metadata of the file: mapped, too
    packed_weights: int
    kv_cache: int
    activations: int  # arenas of a prompt's and of a decoding step, what threads have besides
    tables: int  # rope, merging of attention's segments
    tokenizer: int
    program: int

    @property
    def mapped(self) -> int:
        return self.mapped_weights + self.vocabulary_file

    @property
    def own(self) -> int:
        return self.total - self.mapped

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def memory_needs(
    file: GGUFFile, compilation: Compilation, n_ctx: int, n_threads: int
) -> MemoryNeeds:
    """What a run of one sequence of `n_ctx` positions takes; all else is the compilation's."""
    c, tensors = compilation.config, file.tensors
    packed = {tensor.name: tensor for tensor in packed_tensors(compilation.graph.weights.values())}
    multiplied = {w.name for op in compilation.graph.operations for w in op.matrices}
    embedding = "token_embd.weight"
    mapped = sum(
        tensor.nbytes for name, tensor in tensors.items()
        if name not in packed and name != embedding
    )  # fmt: skip
    is_whole = embedding in multiplied and embedding not in packed
    nbytes = tensors[embedding].nbytes
    mapped += nbytes if is_whole else min(nbytes, _EMBEDDING_NBYTES)
    return MemoryNeeds(
        mapped_weights=mapped,
        vocabulary_file=file.nbytes - sum(tensor.nbytes for tensor in tensors.values()),
        packed_weights=sum(tensor.nbytes for tensor in packed.values()),
        kv_cache=kv_cache_nbytes(compilation, n_ctx),
        activations=_activations(compilation, n_ctx, n_threads),
        tables=_rope_tables(compilation, n_ctx)
        + attention_split.partials_nbytes(c.n_heads, n_ctx, c.head_dim),
        tokenizer=_TOKEN_NBYTES * sum(
            len(value) for key in ("tokens", "merges")
            if isinstance(value := file.metadata.get(f"tokenizer.ggml.{key}"), Sized)
        ),
        program=PROGRAM_NBYTES,
    )  # fmt: skip


def kv_cache_nbytes(compilation: Compilation, n_ctx: int) -> int:
    """The cache of one sequence of `n_ctx` positions."""
    c = compilation.config
    # Reserved, not committed: it costs nothing to ask one.
    cache = KVCache(
        c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, n_ctx, kv_type=c.kv_type
    )
    return cache.pages_per_slot * PAGE * cache.position_nbytes


def _activations(compilation: Compilation, n_ctx: int, n_threads: int) -> int:
    """Every size of step has an arena of its own: here a full prompt's and a single token's."""
    longest = min(n_ctx, MAX_PROMPT)
    sizes = {next(size for size, _ in BUCKETS if size >= longest), 1}
    plans = [compilation.plan(size, 1) for size in sizes]
    scratch = max(plan.scratch_nbytes for plan in plans)
    arenas = sum(
        plan.memory.nbytes + plan.memory.output_nbytes
        + n_threads * thread_stride(plan.memory.private_nbytes)
        for plan in plans
    )  # fmt: skip
    return arenas + n_threads * thread_stride(scratch)


def _rope_tables(compilation: Compilation, n_ctx: int) -> int:
    """One for each way to turn: f32 sines and cosines by position."""
    widths = {
        (op.attributes["base"], op.operand("factors"), RopeScaling.of(op.attributes)):
            int(op.attributes["n_rot"])  # type: ignore[arg-type]
        for op in compilation.graph.operations if "n_rot" in op.attributes
    }  # fmt: skip
    return sum(4 * n_ctx * width for width in widths.values())
