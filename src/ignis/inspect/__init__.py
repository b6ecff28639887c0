"""Looking inside the compiler: what every stage made, as data, as text and as one web page.

`compilation` compiles without running, `layers` sorts ops by layer and rewrites by what they
replaced, `report` turns it all into plain data, `code` shows a kernel's source and machine code,
`dot` draws a graph, `page` writes the web page.
"""

from ignis.inspect.compilation import (
    BUCKETS,
    Compilation,
    PassSnapshot,
    StepPlan,
    inspect_graph,
    inspect_model,
)

__all__ = [
    "BUCKETS",
    "Compilation",
    "PassSnapshot",
    "StepPlan",
    "inspect_graph",
    "inspect_model",
]
