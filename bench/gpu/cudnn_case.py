"""cuDNN's FP8 attention through its front end: E4M3 in and out, one scale a tensor.

Scales come from the amaxes of earlier runs on the same inputs, the best case of delayed scaling.
With casts, a piece also converts its BF16 inputs to FP8 and its FP8 outputs to BF16.
"""

from __future__ import annotations

import math

import cudnn
import torch
import triton
import triton.language as tl
from case import NAMES, Case, Inputs, Refused
from torch_cases import as_batch
from workloads import Workload

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
P_SCALE = 2.0 ** math.floor(math.log2(LARGEST))
SCALING_RUNS = 3  # the scale of dP settles first, then those of dQ and dK


@triton.jit
def scaled_cast(x, y, scale, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count).to(tl.float32) * tl.load(scale)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < count)


def cast(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> None:
    block = 4096
    scaled_cast[(triton.cdiv(x.numel(), block),)](x, y, scale, x.numel(), BLOCK=block, num_warps=8)


def power_of_two_scale(amax: float) -> float:
    return 2.0 ** math.floor(math.log2(LARGEST / amax)) if amax > 0 else 1.0


class CudnnCase(Case):
    def __init__(self, casts: bool, w: Workload, x: Inputs):
        self.w = w
        if w.dim != 128:
            raise Refused("the backward takes d = 128 only")
        q, k, v, dout = as_batch(w, x)
        self.bf16 = {"q": q, "k": k, "v": v, "dO": dout}
        self.results = {"o": torch.empty_like(q), "dQ": torch.empty_like(q)}
        self.results |= {"dK": torch.empty_like(k), "dV": torch.empty_like(k)}
        self.fp8 = {
            name: torch.empty_like(t, dtype=FP8) for name, t in (self.bf16 | self.results).items()
        }
        one = torch.ones(1, 1, 1, 1, device="cuda")
        self.scale = {name: one.clone() for name in (*self.fp8, "s", "dP")}
        self.descale = {name: one.clone() for name in self.scale}
        self.amax = {name: one.clone() for name in ("s", "o", "dQ", "dK", "dV", "dP")}
        batch, tokens = q.shape[:2]
        self.stats = torch.empty(batch, w.heads_q, tokens, 1, device="cuda")
        self.set_scale("s", P_SCALE)
        for name, t in self.bf16.items():
            self.set_scale(name, power_of_two_scale(float(t.abs().max())))
            cast(t, self.fp8[name], self.scale[name])
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        try:
            self.graphs = {"forward": self.build_forward(), "backward": self.build_backward()}
        except cudnn.cudnnGraphNotSupportedError as error:
            raise Refused(str(error).strip().split("\n")[0][:200]) from None
        for _ in range(SCALING_RUNS):
            for direction, names in (("forward", ("o",)), ("backward", ("dP", "dQ", "dK", "dV"))):
                self.execute(direction)
                for name in names:
                    self.set_scale(name, power_of_two_scale(float(self.amax[name])))
                self.execute(direction)
        self.note = f"cuDNN {cudnn.backend_version_string()}, front end {cudnn.__version__}"
        if casts:
            self.pieces = [("forward", self.cast_forward), ("backward", self.cast_backward)]
        else:
            self.pieces = [
                ("forward", lambda: self.execute("forward")),
                ("backward", lambda: self.execute("backward")),
            ]

    def set_scale(self, name: str, scale: float) -> None:
        self.scale[name].fill_(scale)
        self.descale[name].fill_(1 / scale)

    # ---- graphs ---------------------------------------------------------------------------------

    def build(self, define) -> tuple:
        """(graph, tensors by identifier, workspace); `define(graph, tensor)` returns outputs."""
        types = cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )
        tensors = {}

        def layout(t: torch.Tensor):
            """Dimensions, strides and type; (batch, tokens, heads, dim) as cuDNN orders them."""
            if t.dtype == FP8:
                t = t.transpose(1, 2)
                return tuple(t.shape), tuple(t.stride()), types.FP8_E4M3
            return tuple(t.shape), tuple(t.stride()), types.FLOAT

        def tensor(t: torch.Tensor):
            uid = len(tensors) + 1
            tensors[uid] = t
            dim, stride, kind = layout(t)
            return graph.tensor(uid=uid, dim=dim, stride=stride, data_type=kind)

        for node, t in define(graph, tensor):
            uid = len(tensors) + 1
            tensors[uid] = t
            dim, stride, kind = layout(t)
            node.set_uid(uid).set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(
            max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda"
        )
        return graph, tensors, workspace

    def mask(self) -> dict:
        w = self.w
        options = {"attn_scale": 1 / math.sqrt(w.dim)}
        if w.window:
            options |= {"left_bound": w.window, "right_bound": 0}
        else:
            options["use_causal_mask"] = w.causal
        return options

    def build_forward(self):
        def define(graph, tensor):
            inputs = {name: tensor(self.fp8[name]) for name in "qkv"}
            inputs |= {f"descale_{name}": tensor(self.descale[name]) for name in "qkvs"}
            inputs |= {f"scale_{name}": tensor(self.scale[name]) for name in "so"}
            nodes = graph.sdpa_fp8(**inputs, generate_stats=True, **self.mask(), **choice)
            outputs = (self.fp8["o"], self.stats, self.amax["s"], self.amax["o"])
            return zip(nodes, outputs, strict=True)

        choice = {}
        try:
            return self.build(define)
        except cudnn.cudnnGraphNotSupportedError:
            # Newer versions prefer a node that not every device has.
            choice["implementation"] = cudnn.attention_implementation.COMPOSITE
            return self.build(define)

    def build_backward(self):
        def define(graph, tensor):
            inputs = {name: tensor(self.fp8[name]) for name in ("q", "k", "v", "o", "dO")}
            inputs["stats"] = tensor(self.stats)
            for name in ("q", "k", "v", "o", "dO", "s", "dP"):
                inputs[f"descale_{name}"] = tensor(self.descale[name])
            for name in ("s", "dQ", "dK", "dV", "dP"):
                inputs[f"scale_{name}"] = tensor(self.scale[name])
            nodes = graph.sdpa_fp8_backward(**inputs, **self.mask())
            outputs = [self.fp8[name] for name in ("dQ", "dK", "dV")]
            outputs += [self.amax[name] for name in ("dQ", "dK", "dV", "dP")]
            return zip(nodes, outputs, strict=True)

        return self.build(define)

    # ---- pieces ---------------------------------------------------------------------------------

    def execute(self, direction: str) -> None:
        graph, tensors, workspace = self.graphs[direction]
        graph.execute(tensors, workspace, handle=self.handle)

    def cast_in(self, names) -> None:
        for name in names:
            cast(self.bf16[name], self.fp8[name], self.scale[name])

    def cast_out(self, names) -> None:
        for name in names:
            cast(self.fp8[name], self.results[name], self.descale[name])

    def cast_forward(self) -> None:
        self.cast_in("qkv")
        self.execute("forward")
        self.cast_out(("o",))

    def cast_backward(self) -> None:
        self.cast_in(("dO",))
        self.execute("backward")
        self.cast_out(("dQ", "dK", "dV"))

    def outputs(self):
        self.cast_out(("o", "dQ", "dK", "dV"))
        results = (self.results[name] for name in ("o", "dQ", "dK", "dV"))
        return {
            name: t.view(self.w.tokens, *t.shape[-2:])
            for name, t in zip(NAMES, results, strict=True)
        }
