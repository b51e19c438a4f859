"""mxattn's recipes as cases."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import mxattn_capi as m  # noqa: E402
import torch  # noqa: E402
from case import NAMES, Case, Inputs, Refused, Timer  # noqa: E402
from device_attention import DeviceAttention  # noqa: E402
from workloads import Workload  # noqa: E402


class MxattnCase(Case):
    def __init__(self, recipe: str, w: Workload, x: Inputs):
        self.x = x
        window = (w.window - 1 if w.window else -1, -1)
        options = {"recipe": recipe, "causal": w.causal, "window": window}
        cu = [0]
        for length in w.lengths:
            cu.append(cu[-1] + length)
        config = m.make_config(x.q.shape, x.k.shape, len(w.lengths), backend="auto",
                               device=torch.cuda.current_device(), **options)  # fmt: skip
        yes, reason = m.can_run(config)
        if not yes:
            raise Refused(reason)
        self.attention = DeviceAttention(x.q.shape, x.k.shape, cu, **options)
        self.note = f"backend {self.attention.backend}"
        self.out, self.dq = (torch.full_like(x.q, torch.nan) for _ in range(2))
        self.dk, self.dv = (torch.full_like(x.k, torch.nan) for _ in range(2))
        self.lse = torch.full((w.heads_q, w.tokens), torch.nan, device="cuda")
        # The work lists are made once for a microbatch and serve all its layers.
        build = [("plan", self.attention.make_plan)]
        build[0][1]()
        timer = Timer()
        times = sorted(timer.run(build)["plan"] for _ in range(11))
        elements = x.q.numel() + x.k.numel() + x.v.numel()
        self.facts = {
            "plan_ms": round(times[5], 4),
            "extra_bytes": self.attention.extra_bytes,
            # BF16 read and codes written once.
            "quantise_bytes": 3 * elements,
        }
        self.operands = "qkv" if m.recipes()[recipe]["quantized"] else ""
        self.pieces = [("forward", self.forward), ("backward", self.backward)]
        if self.operands:
            self.pieces.insert(0, ("quantise", self.quantise))
        self.call = [("forward", self.whole_forward), ("backward", self.backward)]

    def quantise(self):
        for name in self.operands:
            self.attention.quantize(name, getattr(self.x, name))

    def forward(self, operands=None):
        operands = self.operands if operands is None else operands
        self.attention.forward(
            self.x.q, self.x.k, self.x.v, out=self.out, lse=self.lse, quantized=operands
        )

    def whole_forward(self):
        self.forward("")

    def backward(self):
        inputs = (self.x.q, self.x.k, self.x.v, self.out, self.lse, self.x.dout)
        self.attention.backward(*inputs, dq=self.dq, dk=self.dk, dv=self.dv)

    def outputs(self):
        return dict(zip(NAMES, (self.out, self.dq, self.dk, self.dv), strict=True))
