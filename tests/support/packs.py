"""Random packs for property tests: lengths at every border, masks, grouped heads, strided views."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from mxattn_capi import attention, bfloat16
from reference import bf16, offsets, visible

# Around blocks of 32, tiles of 128 and the chunk border at 128.
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129)


@dataclass
class Case:
    """A pack and everything a call needs but the numbers."""

    q_lens: list[int]
    k_lens: list[int]
    tail: int  # rows beyond the last document
    heads_k: int
    group: int
    dim: int
    causal: bool
    window: tuple[int, int]
    recipe: str
    backend: str
    fused: bool  # q, k, v are views of one (tokens, heads, dim) buffer
    seed: int
    options: dict = field(default_factory=dict)

    @property
    def cu_q(self):
        return offsets(self.q_lens)

    @property
    def cu_k(self):
        return offsets(self.k_lens)

    @property
    def heads_q(self):
        return self.heads_k * self.group

    def rows(self, n):
        return slice(int(self.cu_q[n]), int(self.cu_q[n + 1]))

    def keys(self, n):
        return slice(int(self.cu_k[n]), int(self.cu_k[n + 1]))

    def inputs(self) -> dict[str, np.ndarray]:
        """{"q", "k", "v", "dout"}; rows beyond the documents hold NaN."""
        rng = np.random.default_rng(self.seed)
        total_q, total_k = int(self.cu_q[-1]) + self.tail, int(self.cu_k[-1]) + self.tail
        shapes = {
            "q": (total_q, self.heads_q, self.dim),
            "k": (total_k, self.heads_k, self.dim),
            "v": (total_k, self.heads_k, self.dim),
            "dout": (total_q, self.heads_q, self.dim),
        }
        if self.fused and total_q == total_k:
            buffer = np.full((total_q, self.heads_q + 2 * self.heads_k + 1, self.dim), np.nan)
            buffer = bf16(buffer)
            a, b = self.heads_q, self.heads_q + self.heads_k
            x = {"q": buffer[:, :a], "k": buffer[:, a:b], "v": buffer[:, b:-1]}
            x["dout"] = np.empty(shapes["dout"], bfloat16)
        else:
            x = {name: np.empty(shape, bfloat16) for name, shape in shapes.items()}
        for name, array in x.items():
            array[...] = bf16(rng.standard_normal(shapes[name]))
            used = self.cu_k[-1] if name in ("k", "v") else self.cu_q[-1]
            array[used:] = np.nan
        x["q"][: self.cu_q[-1]] *= bf16([1, 4, 8][self.seed % 3])  # flat and peaked rows
        return x

    def run(self, x, **options) -> dict[str, np.ndarray]:
        return attention(
            x["q"], x["k"], x["v"], self.cu_q, self.cu_k, x["dout"], recipe=self.recipe,
            backend=self.backend, causal=self.causal, window=self.window,
            **{**self.options, **options},
        )  # fmt: skip

    def last_visible(self, n) -> np.ndarray:
        """Per query of document n: one past the last key that it sees, 0 if none."""
        mask = visible(self.q_lens[n], self.k_lens[n], self.causal, self.window)
        key = np.arange(1, self.k_lens[n] + 1)
        return (mask * key).max(1, initial=0)


def copied(x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs again, with the same strides, changing neither the other."""
    result = {}
    for name, array in x.items():
        if array.base is not None and array.base.ndim == 3:
            base = array.base.copy()
            offset = (array.ctypes.data - array.base.ctypes.data) // base.strides[1]
            result[name] = base[:, offset : offset + array.shape[1]]
        else:
            result[name] = array.copy()
    return result


# Only the oracle runs these.
ORACLE_ONLY = ("mxfp8_paper", "fp8_tensor", "exact")


@st.composite
def cases(draw, backends, recipes, same_lengths=None, max_documents=3, causal=None):
    recipe = draw(st.sampled_from(recipes))
    backend = draw(st.sampled_from(backends))
    if recipe == "bf16" and backend == "cpu_h200":
        backend = "cpu"  # the accumulator model takes codes
    if recipe in ORACLE_ONLY:
        backend = "cpu_exact"
    # The oracle is slow: fewer documents and heads, the same borders.
    small = backend == "cpu_exact"
    documents = draw(st.integers(1, 2 if small else max_documents))
    length = st.sampled_from(LENGTHS) | st.integers(0, 160 if small else 300)
    q_lens = [draw(length) for _ in range(documents)]
    same = draw(st.booleans()) if same_lengths is None else same_lengths
    k_lens = q_lens if same else [draw(length) for _ in range(documents)]
    group = draw(st.sampled_from([1, 2] if small else [1, 2, 8]))
    mask = draw(st.sampled_from(["causal", "window", "causal_window", "full"]))
    if causal:
        mask = "causal" if mask in ("causal", "full") else "causal_window"
    left = draw(st.sampled_from([0, 1, 31, 77, 128, 200]))
    return Case(
        q_lens=q_lens,
        k_lens=k_lens,
        tail=draw(st.sampled_from([0, 3])),
        heads_k=1 if small or group == 8 else draw(st.integers(1, 2)),
        group=group,
        dim=draw(st.sampled_from([64, 128, 40] if small else [64, 128, 128, 40, 256])),
        causal=mask in ("causal", "causal_window"),
        window=(left if "window" in mask else -1, 5 if mask == "window" else -1),
        recipe=recipe,
        backend=backend,
        fused=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        options={"threads": draw(st.integers(1, 3))},
    )
