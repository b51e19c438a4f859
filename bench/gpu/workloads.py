"""The named workloads of ./dev bench gpu."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Workload:
    """A pack of documents, one after the other; a dense batch is a pack of equal ones."""

    name: str
    lengths: tuple[int, ...]
    heads_q: int = 16
    heads_k: int = 16
    dim: int = 128
    causal: bool = True
    window: int = 0  # keys that a query sees, itself the last one; 0: all

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def plain(self) -> bool:
        return (self.heads_q, self.dim, self.causal, self.window) == (self.heads_k, 128, True, 0)

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right) as flash_attn_varlen_func takes it; -1: no bound."""
        return (self.window - 1 if self.window else -1, 0 if self.causal else -1)

    def tiny(self) -> Workload:
        """A small one that runs the same code."""
        return replace(self, name="", lengths=(256, 256) if self.equal else (256, 128))

    def forward_flops(self) -> float:
        """4 d for every pair of query and key; causal counts half the square."""
        pairs = 0.0
        for s in self.lengths:
            if self.window:
                short = min(s, self.window)
                pairs += short * (short + 1) / 2 + (s - short) * self.window
            else:
                pairs += s * s / (2 if self.causal else 1)
        return 4 * pairs * self.dim * self.heads_q


PACKS = (
    Workload("1x65536", (65536,)),
    Workload("2x32768", (32768,) * 2),
    Workload("4x16384", (16384,) * 4),
    Workload("8x8192", (8192,) * 8),
    Workload("16x4096", (4096,) * 16),
    Workload("32x2048", (2048,) * 32),
    Workload("64x1024", (1024,) * 64),
    Workload("8192+224x256", (8192,) + (256,) * 224),
    Workload("32768+128x256", (32768,) + (256,) * 128),
)
DENSE = (
    Workload("4x4096", (4096,) * 4),
    Workload("2x8192", (8192,) * 2),
    Workload("1x16384", (16384,)),
    Workload("1x32768", (32768,)),
)
VARIANTS = (
    Workload("1x16384 gqa 4:1", (16384,), heads_k=4),
    Workload("1x16384 full", (16384,), causal=False),
    Workload("1x16384 window 1024", (16384,), window=1024),
    Workload("1x16384 d 64", (16384,), dim=64),
)
ALL = PACKS + DENSE + VARIANTS

# What matters most comes first: time may run out.
ORDER = ("1x16384", "16x4096", "8192+224x256", "64x1024", "32768+128x256", "4x16384", "8x8192",
         "32x2048", "2x32768", "1x65536")  # fmt: skip
BY_NAME = {w.name: w for w in ALL}
IN_ORDER = [BY_NAME[name] for name in ORDER] + [w for w in ALL if w.name not in ORDER]
QUICK = ("1x16384", "16x4096", "8192+224x256", "64x1024")
