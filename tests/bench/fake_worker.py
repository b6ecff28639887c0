"""An engine for `bench.compare` that sleeps: `python -m tests.bench.fake_worker KIND SECONDS`."""

import struct
import sys
import time

from bench.worker import serve


class FakeEngine:
    """Takes SECONDS a call, however many tokens. KIND: "own" says more, "peer" does not."""

    n_vocab = 50

    def __init__(self, kind, seconds):
        if kind == "broken":
            raise RuntimeError("no such model")
        self.kind, self.seconds = kind, seconds
        self.ids = []
        print("noise on stdout")

    def about(self):
        work = {"int8_macs": 10**9, "f32_macs": 0, "weight_nbytes": 10**8, "kv_nbytes": 0}
        more = {"work": {"prefill": work, "decode": work}}
        return {"version": "fake 1", **(more if self.kind == "own" else {})}

    def ceilings(self):
        if self.kind != "own":
            return None
        return {"bandwidth_gb_s": 100.0, "int8_gmac_s": 1000.0, "f32_gmac_s": 50.0}

    def clear(self):
        self.ids = []

    def feed(self, ids):
        if self.kind == "crash" and len(ids) == 1:
            print("Segmentation fault", file=sys.stderr, flush=True)
            sys.exit(7)
        time.sleep(self.seconds)
        self.ids += ids

    def logits(self):
        return struct.pack(f"<{self.n_vocab}f", *((i * len(self.ids)) % 7 for i in range(50)))


if __name__ == "__main__":
    serve(lambda: FakeEngine(sys.argv[1], float(sys.argv[2])))
