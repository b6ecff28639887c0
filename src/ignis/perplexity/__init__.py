"""How well a model predicts a text, alone and against the distributions of another run.

    windows     text to windows of tokens, and which of their tokens are scored
    rows        logits of a position to numbers
    kl_base     the file that keeps a run's distributions
    estimate    numbers of all positions to perplexity, divergence and their errors
    measure     the whole run

    from ignis.perplexity import measure_perplexity
    with ignis.load("model.gguf", n_ctx=512) as model:
        print(measure_perplexity(model, text).perplexity)       # 14.0112 +/- 0.3245
"""

from ignis.perplexity.estimate import Divergence, Estimate, PerplexityResult
from ignis.perplexity.kl_base import KLBase, open_kl_base
from ignis.perplexity.measure import measure_perplexity

__all__ = [
    "Divergence", "Estimate", "KLBase", "PerplexityResult", "measure_perplexity", "open_kl_base",
]  # fmt: skip
