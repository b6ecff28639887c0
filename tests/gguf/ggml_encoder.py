"""ggml's own encoders, through llama-cpp-python where that is installed (`pip install .[peers]`).

    python -m tests.gguf.ggml_encoder       writes encode_errors.json anew

The file holds what ggml's encoders lose, without an importance matrix, on the seeded `cases`: for
each format and case the weighted squared error, under the weights that these encoders work with
(`weighed`), and the root mean square error. Beside them, what our encoders make of `exact_rows`, as
digests.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ignis.gguf import BLOCKS

GOLDEN = Path(__file__).with_name("encode_errors.json")
SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
"""The formats whose encoders search for scales; ggml's others have a defined result."""

Array = NDArray[np.float32]


def cases(seed: int = 0) -> dict[str, Array]:
    """Rows of many kinds, [8, 1024] each. RandomState's numbers never change."""
    random = np.random.RandomState(seed)
    shape = (8, 1024)
    normal = random.normal(size=shape)
    outliers = np.where(random.uniform(size=shape) < 0.01, 20 * normal, normal)
    made = {
        "normal": 0.02 * normal, "laplace": random.laplace(size=shape),
        "uniform": random.uniform(-1, 1, shape), "outliers": outliers, "positive": np.abs(normal),
        "shifted": 0.3 * random.normal(size=shape) - 1, "heavy tail": random.standard_t(3, shape),
        "sparse": normal * (random.uniform(size=shape) < 0.1),
        "growing": random.normal(size=shape) * np.linspace(0.01, 1, 1024),
    }  # fmt: skip
    return {name: values.astype(np.float32) for name, values in made.items()}


def exact_rows() -> Array:
    """[64, 512] numbers of many sizes, made of whole numbers: the same with every libm."""
    random = np.random.RandomState(4)
    whole = random.randint(-(1 << 11), 1 << 11, (64, 512)) * random.randint(1, 1 << 11, (64, 512))
    return np.ldexp(whole.astype(np.float32), np.arange(-38, 26)[:, None]).astype(np.float32)


def digest(name: str) -> str:
    """The digest of our encoder's bytes for `exact_rows`."""
    return hashlib.sha256(BLOCKS[name].encode(exact_rows()).tobytes()).hexdigest()[:16]


def errors(name: str, values: Array, raw: NDArray[np.uint8]) -> tuple[float, float]:
    """The weighted squared error and the root mean square error of `raw`."""
    x = values.astype(np.float64)
    squared = (BLOCKS[name].decode(raw) - x) ** 2
    return float((weighed(name, x) * squared).sum()), float(np.sqrt(squared.mean()))


def weighed(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weight of each squared error in ggml's encoder."""
    if name in ("q4_k", "q5_k"):
        parts = x.reshape(-1, 32)
        rms = np.sqrt((parts**2).mean(axis=1, keepdims=True))
        return (np.abs(parts) + rms).reshape(x.shape)
    return np.abs(x) if name == "q2_k" else x**2


def ggml_encode(name: str, values: Array) -> NDArray[np.uint8] | None:
    """Encode [n, k] rows with ggml; None where its library is not installed."""
    package = find_spec("llama_cpp")
    if package is None or package.origin is None:
        return None
    found = sorted((Path(package.origin).parent / "lib").glob("libggml-base.*"))
    if not found:
        return None
    encode = ctypes.CDLL(str(found[0])).ggml_quantize_chunk
    encode.restype = ctypes.c_size_t
    encode.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
                       ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    values = np.ascontiguousarray(values)
    raw = np.zeros((len(values), BLOCKS[name].row_nbytes(values.shape[1])), np.uint8)
    nbytes = encode(BLOCKS[name].ggml_type, values.ctypes.data, raw.ctypes.data, 0, *values.shape,
                    None)
    assert nbytes == raw.size
    return raw


def main() -> None:
    table: dict[str, dict[str, tuple[float, ...]]] = {}
    for name in SEARCHED:
        table[name] = {}
        for case, values in cases().items():
            raw = ggml_encode(name, values)
            assert raw is not None, "llama-cpp-python is not installed"
            table[name][case] = tuple(float(f"{e:.6g}") for e in errors(name, values, raw))
    origin = "ggml_quantize_chunk without an importance matrix, llama-cpp-python 0.3.36; made by " \
             "python -m tests.gguf.ggml_encoder: [weighted squared error, root mean square error]"
    lines = [f'    "{name}": {json.dumps(row)}' for name, row in table.items()]
    lines.append(f'    "digests": {json.dumps({name: digest(name) for name in SEARCHED})}')
    GOLDEN.write_text(f'{{\n    "origin": "{origin}",\n' + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
