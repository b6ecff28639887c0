"""Making GGUF files of smaller types: GGUF or a Hugging Face checkpoint in, GGUF out.

    with open_gguf("model-f16.gguf") as file, GGUFSource(file) as source:
        quantize(source, Path("model-q4_k_m.gguf"), Options(type="q4_k_m"))

`mix` says which tensor gets which format, `source` reads rows, `encode` turns them on all
threads, `convert` writes.
"""
