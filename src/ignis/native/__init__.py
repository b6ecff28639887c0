"""LLVM: emit, compile, cache. The only package that imports llvmlite."""
