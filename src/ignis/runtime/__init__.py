"""From a compiled plan to logits: plan, arena, thread team, KV cache, session."""
