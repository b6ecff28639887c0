"""gemma3: gemma2's layer with normalized heads instead of caps, and two rope bases.

Five layers of six see a sliding window; their rope turns by a base of 10000 and is not stretched,
the sixth's by what the file says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ignis.graph.ir import Value
from ignis.graph.models import gemma2
from ignis.graph.models.architecture import Architecture
from ignis.graph.models.lowering import Lowering

if TYPE_CHECKING:
    from ignis.graph.models.config import ModelConfig

_LAYERS_OF_27B = 62
_LOCAL_ROPE_BASE = 10000.0


def layer(m: Lowering, i: int, x: Value) -> Value:
    """As in gemma2, with norms on the heads of q and k."""
    return gemma2.layer(m, i, x, head_norms=True)


def complete(config: ModelConfig) -> ModelConfig:
    """The scales as in gemma2, and the local layers' rope base where the file has none."""
    config = gemma2.with_gemma_scales(config, _LAYERS_OF_27B)
    return config._replace(local_rope_base=config.local_rope_base or _LOCAL_ROPE_BASE)


GEMMA3 = Architecture(
    "gemma3",
    rope_style="neox",
    layer=layer,
    honours=frozenset(
        {
            "attention.scale",
            "attention.sliding_window",
            "final_logit_softcapping",
            "rope.freq_base_swa",
        }
    ),
    window_pattern=6,
    complete=complete,
)
