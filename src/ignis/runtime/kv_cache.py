"""The KV cache: pages of 16 positions, committed by the system as sequences grow.

Per layer and key head, pages lie one behind the other, so that a sequence whose pages were handed
out in order is one stream in memory:

    [layer][key head][page] { K: [d][16 keys] | V: [16 keys][d] }

`kernels.kv_pages` knows what a page holds. Pages are zeroed when they are handed out.
"""

from __future__ import annotations

import numpy as np

from ignis.errors import UsageError
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.kernels import attention_split
from ignis.kernels.kv_pages import PAGE, page_nbytes
from ignis.runtime.memory import Memory


class KVCache:
    """Keys and values of `n_slots` sequences of up to `n_ctx` positions each."""

    def __init__(
        self, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, n_ctx: int,
        n_slots: int = 1, kv_type: str = DEFAULT_KV_TYPE,
    ) -> None:  # fmt: skip
        self.n_ctx, self.n_slots = n_ctx, n_slots
        self.pages_per_slot = -(-n_ctx // PAGE)
        self.n_pages = self.pages_per_slot * n_slots
        self._n_streams = n_layers * n_kv_heads
        self._page_nbytes = page_nbytes(head_dim, kv_type)
        self._stream_nbytes = self.n_pages * self._page_nbytes
        self._layer_nbytes = n_kv_heads * self._stream_nbytes
        self._pool = Memory(n_layers * self._layer_nbytes)
        self._table_memory = Memory(4 * self.n_pages)
        self._table = self._table_memory.view(np.int32, self.n_pages).reshape(n_slots, -1)
        self.max_segments = attention_split.max_segments(n_ctx)
        self._partials = Memory(attention_split.partials_nbytes(n_heads, n_ctx, head_dim))
        self._arrived = Memory(8 * n_heads)
        self._held = [0] * n_slots  # pages of each slot
        # Taken from the end: ascending pages first, so that a sequence is a stream.
        self._free = list(range(self.n_pages))[::-1]
        self._dirty = np.zeros(self.n_pages, np.bool_)

    def base(self, layer: int) -> int:
        """The address of a layer's pages."""
        return self._pool.address + layer * self._layer_nbytes

    @property
    def table_address(self) -> int:
        """The page table: i32 [slot][pages_per_slot]."""
        return self._table_memory.address

    @property
    def partials_address(self) -> int:
        """Where attention keeps the segments of a single token before it merges them."""
        return self._partials.address

    @property
    def arrived_address(self) -> int:
        """Counters of finished segments, i64 a chunk of heads; zero between steps."""
        return self._arrived.address

    def begin_step(self) -> None:
        """Set the counters to zero: a step that Ctrl-C ended has left them where they were."""
        self._arrived.bytes[:] = 0

    @property
    def position_nbytes(self) -> int:
        """What one position costs, all layers together."""
        return self._n_streams * self._page_nbytes // PAGE

    def reserve(self, slot: int, n_positions: int) -> None:
        """Hand out pages so that the slot can hold `n_positions`."""
        if n_positions > self.n_ctx:
            raise UsageError("the sequence is longer than the context", got=n_positions,
                             wanted=f"at most {self.n_ctx}", hint="raise --ctx")  # fmt: skip
        wanted = -(-n_positions // PAGE)
        for index in range(self._held[slot], wanted):
            page = self._free.pop()
            if self._dirty[page]:
                self._clear(page)
            self._dirty[page] = True
            self._table[slot, index] = page
        self._held[slot] = max(self._held[slot], wanted)

    def truncate(self, slot: int, n_positions: int) -> None:
        """Take back the pages behind the first `n_positions`."""
        kept = -(-n_positions // PAGE)
        if kept < self._held[slot]:
            self._free.extend(int(p) for p in self._table[slot, kept : self._held[slot]][::-1])
            self._held[slot] = kept

    def _clear(self, page: int) -> None:
        pool = self._pool.bytes[: self._n_streams * self._stream_nbytes]
        pool.reshape(self._n_streams, self.n_pages, self._page_nbytes)[:, page] = 0
