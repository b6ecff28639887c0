"""A model becomes a graph in SSA form; passes rewrite it; a planner lays its memory out.

`ir` is the language (types, ops, printer, parser, verifier, interpreter), `models` lowers GGUF
architectures to it, `passes` are pure functions from graph to graph, and the memory planner.
"""
