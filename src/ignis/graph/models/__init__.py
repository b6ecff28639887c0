"""GGUF architectures lowered to graphs: one small file each, shared blocks beside them."""

from ignis.graph.models.config import ModelConfig
from ignis.graph.models.lowering import build_graph
from ignis.graph.models.registry import ARCHITECTURES

__all__ = ["ARCHITECTURES", "ModelConfig", "build_graph"]
