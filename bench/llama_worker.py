"""llama.cpp, through llama-cpp-python's bindings: `python -m bench.llama_worker MODEL THREADS ...`.

Only ctypes, the bindings and `bench.worker` are imported: the interpreter may be any that has them.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from typing import Any

from bench.worker import serve


class LlamaEngine:
    """A model and a context of llama.cpp. `repack` lets it rearrange weights when it loads."""

    def __init__(self, path: str, n_threads: int, n_ctx: int, repack: bool) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise RuntimeError(
                "llama-cpp-python is not installed for this interpreter; install the extra "
                "'peers', or give --peer-python"
            ) from None
        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, 512, 512
        params.n_threads = params.n_threads_batch = n_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context for {path}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def about(self) -> dict[str, Any]:
        return {"version": f"llama-cpp-python {self._lib.__version__}"}

    def ceilings(self) -> None:
        return None

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)

    def feed(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            tokens = (self._lib.llama_token * len(part))(*part)
            batch = self._lib.llama_batch_get_one(tokens, len(part))
            if (code := self._lib.llama_decode(self._context, batch)) != 0:
                raise RuntimeError(f"llama_decode returned {code}")
        self._lib.llama_synchronize(self._context)

    def logits(self) -> bytes:
        row = self._lib.llama_get_logits_ith(self._context, -1)
        return ctypes.string_at(row, 4 * self.n_vocab)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve llama.cpp to bench.compare.")
    parser.add_argument("model")
    parser.add_argument("n_threads", type=int)
    parser.add_argument("n_ctx", type=int)
    parser.add_argument("--no-repack", action="store_true")
    given = parser.parse_args()
    serve(lambda: LlamaEngine(given.model, given.n_threads, given.n_ctx, not given.no_repack))


if __name__ == "__main__":
    main()
