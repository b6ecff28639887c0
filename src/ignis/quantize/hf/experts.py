"""Mixtures of experts: each expert's matrices are tensors of their own, which GGUF has in one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ignis.errors import ModelFileError
from ignis.gguf import BLOCKS
from ignis.quantize.hf.tensors import Stored
from ignis.quantize.source import Rows, SourceTensor


def stacked(name: str, experts: Mapping[int, Stored], n_experts: int, where: object
            ) -> SourceTensor:
    """The matrices of all experts, [N, K] each, as one tensor [n_experts, N, K].

    Raises ModelFileError unless there is one of each, and all are alike.
    """
    missing = set(range(n_experts)) ^ set(experts)
    if missing:
        raise ModelFileError(f"tensor {name}: not one matrix an expert", where=where,
                             got=f"{len(experts)}, expert {min(missing)} among the wrong ones",
                             wanted=n_experts)
    parts = [experts[i] for i in range(n_experts)]
    kinds = {(part.shape, part.dtype) for part in parts}
    if len(kinds) > 1 or len(parts[0].shape) != 2:
        raise ModelFileError(f"tensor {name}: the experts are not alike", where=where)
    n_rows = parts[0].shape[0]

    def read(start: int, stop: int) -> Rows:
        pieces = []
        while start < stop:
            expert, first = divmod(start, n_rows)
            last = min(first + stop - start, n_rows)
            pieces.append(parts[expert].read(first, last))
            start += last - first
        return np.concatenate(pieces)

    return SourceTensor(name, (n_experts, *parts[0].shape), BLOCKS[parts[0].dtype], read)
