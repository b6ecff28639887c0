"""The processor as data: what kernels are specialised on, and what names a cached object.

`native.host` reads the machine we run on; everything above only sees this value, so the same
kernels can be emitted for another machine (AArch64) or for a lower feature level on purpose.
"""

from __future__ import annotations

from typing import NamedTuple

_LEVELS: dict[str, tuple[str, str]] = {
    # name -> (LLVM CPU name, triple architecture)
    "x86-64-v2": ("x86-64-v2", "x86_64"),
    "x86-64-v3": ("x86-64-v3", "x86_64"),
    "x86-64-v4": ("x86-64-v4", "x86_64"),
    "aarch64": ("generic", "aarch64"),
    "aarch64-dotprod": ("generic", "aarch64"),
}

_LEVEL_FEATURES: dict[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"sse4.1", "sse4.2", "ssse3"}),
    "x86-64-v3": frozenset({"sse4.1", "sse4.2", "ssse3", "avx", "avx2", "fma", "f16c"}),
    "x86-64-v4": frozenset({"sse4.1", "sse4.2", "ssse3", "avx", "avx2", "fma", "f16c", "avx512f",
                            "avx512bw", "avx512vl", "avx512dq"}),
    "aarch64": frozenset({"neon"}),
    "aarch64-dotprod": frozenset({"neon", "dotprod"}),
}


# LLVM's names of x86 processors of other makers, or of none in particular.
_NOT_INTEL = ("znver", "bdver", "btver", "amdfam", "barcelona", "athlon", "k8", "x86-64", "generic")


class Target(NamedTuple):
    """One processor: LLVM triple and CPU name, the features it is known to have and to lack.

    A CPU name brings all features of its model, and a hypervisor may hide some of them (a Zen 4
    without AVX-512): what is known to be `absent` is therefore said too.
    """

    triple: str
    cpu: str
    features: frozenset[str]
    absent: frozenset[str] = frozenset()

    @classmethod
    def level(cls, name: str, operating_system: str = "unknown-linux-gnu") -> Target:
        """A target by feature level: `x86-64-v2`, `x86-64-v3`, `x86-64-v4`, `aarch64[-dotprod]`.

        Raises `KeyError` for any other name; `levels()` lists them.
        """
        cpu, architecture = _LEVELS[name]
        return cls(f"{architecture}-{operating_system}", cpu, _LEVEL_FEATURES[name])

    @staticmethod
    def levels() -> tuple[str, ...]:
        return tuple(_LEVELS)

    @property
    def is_x86(self) -> bool:
        return self.triple.startswith("x86_64")

    @property
    def is_arm(self) -> bool:
        return self.triple.startswith(("aarch64", "arm64"))

    def runs(self, other: Target) -> bool:
        """Whether code for `other` runs here."""
        return self.is_x86 == other.is_x86 and other.features <= self.features

    def has(self, feature: str) -> bool:
        return feature in self.features

    @property
    def has_fma(self) -> bool:
        """Whether one instruction multiplies and adds with a single rounding."""
        return self.is_arm or self.has("fma")

    @property
    def has_half(self) -> bool:
        """Whether one instruction converts between f16 and f32."""
        return self.is_arm or self.has("f16c")

    @property
    def vector_bits(self) -> int:
        """The widest vector that arithmetic should use."""
        if self.is_arm or not self.has("avx2"):
            return 128
        return 512 if self.has("avx512bw") and self.has("avx512vl") else 256

    @property
    def arithmetic(self) -> str:
        """The instructions that decide how fast kernels are, for reports: `AVX2`, for example."""
        if self.is_arm:
            return "NEON with dot products" if self.has("dotprod") else "NEON"
        if self.vector_bits == 512:
            return "AVX-512 VNNI" if self.has("avx512vnni") else "AVX-512"
        if self.vector_bits == 256:
            return "AVX-VNNI" if self.has("avxvnni") else "AVX2"
        return "SSE"

    @property
    def vector_registers(self) -> int:
        """How many vectors fit the registers: AVX-512 and NEON have 32."""
        return 32 if self.is_arm or self.vector_bits == 512 else 16

    @property
    def is_intel(self) -> bool:
        """Whether this is one of Intel's processors by name; a feature level is nobody's."""
        return self.is_x86 and not self.cpu.startswith(_NOT_INTEL)

    @property
    def stream_ahead(self) -> int:
        """How far ahead of a stream that is computed on to ask for memory, in bytes; 0: not at all.

        Intel's cores fetch a stream no further ahead than instructions in flight reach, which is
        little where a load feeds many of them. AMD's do better alone than with advice.
        """
        return 4096 if self.is_intel else 0

    @property
    def feature_string(self) -> str:
        """The features in the spelling that LLVM wants, in a stable order."""
        present = [f"+{name}" for name in sorted(self.features)]
        return ",".join(present + [f"-{name}" for name in sorted(self.absent)])
