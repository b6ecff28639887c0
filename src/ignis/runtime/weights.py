"""Where each weight lies: in the mapped file as it is, or packed in memory of our own.

The graph says which is meant, weight by weight: the pass `layout` has laid it out. Packed, a matrix
of an integer format is a sequence of panels; one of floats keeps its rows, and gains by huge pages,
which a mapped file does not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ignis.errors import UsageError
from ignis.gguf import BLOCKS, GGUFFile
from ignis.graph.ir import Graph, TensorType, Value
from ignis.graph.ir.types import ALIGNMENT, MAPPED, PANELS, align
from ignis.kernels.panels import FORMATS
from ignis.kernels.rows import ROWS
from ignis.runtime.cgroup import free_memory
from ignis.runtime.memory import Memory

LAYOUTS = ("auto", "mapped", "packed")


class PackedTensor(NamedTuple):
    """A matrix to pack, or those of all experts; `nbytes` is what they take when packed.

    `n_rows` are those of one expert, or of all there is.
    """

    name: str
    format: str
    layout: str  # "panels" or "rows"
    n_experts: int
    n_rows: int
    n_values: int
    nbytes: int


class PackingPiece(NamedTuple):
    """Some rows of one expert of a tensor to pack: whole panels, `nbytes` in the file."""

    tensor: PackedTensor
    expert: int
    first_row: int
    n_rows: int
    nbytes: int

    @property
    def offset_bytes(self) -> int:
        """Where the rows lie in the file's tensor."""
        row = self.expert * self.tensor.n_rows + self.first_row
        return row * BLOCKS[self.tensor.format].row_nbytes(self.tensor.n_values)

    @property
    def packed_offset_bytes(self) -> int:
        """Where they lie, packed, in the tensor's own memory."""
        if self.tensor.layout != PANELS:
            return self.offset_bytes
        panel_nbytes = FORMATS[self.tensor.format].panel_nbytes(self.tensor.n_values)
        before = self.expert * (self.tensor.nbytes // self.tensor.n_experts)
        return before + self.first_row // ROWS * panel_nbytes


def packing_pieces(tensor: PackedTensor, limit_nbytes: int) -> Iterator[PackingPiece]:
    """Cut a tensor into pieces of at most `limit_nbytes` of the file, or of one panel."""
    row_nbytes = BLOCKS[tensor.format].row_nbytes(tensor.n_values)
    most = max(limit_nbytes // row_nbytes // ROWS, 1) * ROWS
    for expert in range(tensor.n_experts):
        for first in range(0, tensor.n_rows, most):
            n_rows = min(most, tensor.n_rows - first)
            yield PackingPiece(tensor, expert, first, n_rows, n_rows * row_nbytes)


def packed_tensors(weights: Iterable[Value]) -> list[PackedTensor]:
    """Those of a graph's weights that it has packed."""
    alike: dict[TensorType, PackedTensor] = {}  # layers repeat a few types
    found = []
    for weight in weights:
        if weight.type.layout == MAPPED:
            continue
        if weight.type not in alike:
            alike[weight.type] = _packed(weight)
        found.append(alike[weight.type]._replace(name=weight.name))
    return found


def _packed(weight: Value) -> PackedTensor:
    format, layout = weight.type.dtype, weight.type.layout
    *experts, n_rows, n_values = weight.type.sizes(0, 0)
    n_experts = experts[0] if experts else 1
    if layout == PANELS:
        nbytes = -(-n_rows // ROWS) * FORMATS[format].panel_nbytes(n_values)
    else:
        nbytes = n_rows * BLOCKS[format].row_nbytes(n_values)
    return PackedTensor(
        weight.name, format, layout, n_experts, n_rows, n_values, n_experts * nbytes
    )


def choose_layout(wanted: str, tensors: list[PackedTensor]) -> str:
    """`packed` or `mapped`; `auto` packs where the panels fit into half of the memory left.

    `tensors` are those that would be packed. Raises: UsageError for another word.
    """
    if wanted not in LAYOUTS:
        raise UsageError("no such weight layout", got=wanted, wanted=" or ".join(LAYOUTS))
    if wanted != "auto":
        return wanted
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return "packed" if nbytes <= available_memory() // 2 else "mapped"


def available_memory() -> int:
    """Bytes this process may still take: what the system has, within the cgroup's limit."""
    available = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        if hasattr(os, "sysconf"):
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limited = free_memory()
    return available if limited is None else min(available, limited)


class WeightStore:
    """Addresses of all weights of a graph; whoever runs kernels fills those in `packed`."""

    def __init__(self, file: GGUFFile, graph: Graph) -> None:
        self._file = file  # addresses point into its mapping
        self.packed = packed_tensors(graph.weights.values())
        # A cache line apart: no two tensors of one size start a power of two apart.
        self._packed = Memory(sum(align(t.nbytes) + ALIGNMENT for t in self.packed), huge=True)
        self.addresses = {name: file.address(name) for name in graph.weights}
        offset = 0
        for tensor in self.packed:
            self.addresses[tensor.name] = self._packed.address + offset
            offset = align(offset + tensor.nbytes) + ALIGNMENT

    @property
    def layout(self) -> str:
        """Whether any weight is `packed`, or all are `mapped`."""
        return "packed" if self.packed else "mapped"
