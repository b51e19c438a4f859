"""The C ABI of include/mxattn/mxattn.h through ctypes and numpy, for tests and benchmarks.

Tensors are numpy arrays (tokens, heads, dim) of ml_dtypes.bfloat16 with any strides, or of torch
for devices. `Attention` holds a problem and the saved state; `attention` is the whole call in one
function.
"""

from __future__ import annotations

import ctypes as c
import os
from pathlib import Path

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)

OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2
CPU, CUDA = 0, 1
DTYPES = {1: bfloat16, 2: np.dtype(np.float32), 3: float8_e4m3, 4: np.dtype(np.int8),
          5: np.dtype(np.int32)}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
OPERANDS = {"q": 1, "k": 2, "v": 4}
MAX_RANK = 4


class Tensor(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("dtype", c.c_int32),
        ("rank", c.c_int32),
        ("shape", c.c_int64 * MAX_RANK),
        ("strides", c.c_int64 * MAX_RANK),
    ]


class ProblemConfig(c.Structure):
    _fields_ = [
        ("size", c.c_uint64),
        ("recipe", c.c_char_p),
        ("backend", c.c_char_p),
        ("device_kind", c.c_int32),
        ("device_index", c.c_int32),
        ("total_q", c.c_int64),
        ("total_k", c.c_int64),
        ("num_documents", c.c_int32),
        ("heads_q", c.c_int32),
        ("heads_k", c.c_int32),
        ("head_dim", c.c_int32),
        ("causal", c.c_int32),
        ("window_left", c.c_int32),
        ("window_right", c.c_int32),
        ("has_softmax_scale", c.c_int32),
        ("softmax_scale", c.c_float),
        ("rotate", c.c_int32),
        ("threads", c.c_int32),
    ]


class BufferInfo(c.Structure):
    _fields_ = [
        ("size", c.c_uint64),
        ("name", c.c_char_p),
        ("dtype", c.c_int32),
        ("rank", c.c_int32),
        ("shape", c.c_int64 * MAX_RANK),
        ("bytes", c.c_uint64),
        ("alignment", c.c_uint64),
    ]


class Buffer(c.Structure):
    _fields_ = [("data", c.c_void_p), ("bytes", c.c_uint64)]


class Call(c.Structure):
    _fields_ = [
        ("cu_seqlens_q", Tensor),
        ("cu_seqlens_k", Tensor),
        ("state", c.POINTER(Buffer)),
        ("num_state", c.c_int32),
        ("reserved", c.c_int32),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_uint64),
        ("stream", c.c_void_p),
        ("plan", c.c_void_p),
    ]


class ForwardArgs(c.Structure):
    _fields_ = [("size", c.c_uint64), ("call", Call)] + [
        (name, Tensor) for name in ("q", "k", "v", "out", "lse")
    ]
    _fields_ += [("quantized", c.c_int32), ("reserved", c.c_int32)]


class BackwardArgs(c.Structure):
    _fields_ = [("size", c.c_uint64), ("call", Call)] + [
        (name, Tensor) for name in ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv")
    ]


class QuantizeArgs(c.Structure):
    _fields_ = [
        ("size", c.c_uint64),
        ("call", Call),
        ("tensor", Tensor),
        ("operand", c.c_int32),
        ("reserved", c.c_int32),
    ]


class DevicePlanArgs(c.Structure):
    _fields_ = [
        ("size", c.c_uint64),
        ("cu_seqlens_q", Tensor),
        ("cu_seqlens_k", Tensor),
        ("memory", c.c_void_p),
        ("memory_bytes", c.c_uint64),
        ("workspace", c.c_void_p),
        ("workspace_bytes", c.c_uint64),
        ("stream", c.c_void_p),
    ]


class RecipeInfo(c.Structure):
    _fields_ = [
        ("size", c.c_uint64),
        ("name", c.c_char_p),
        ("form", c.c_char_p),
        ("summary", c.c_char_p),
        ("version", c.c_int32),
        ("control", c.c_int32),
        ("strictly_causal", c.c_int32),
        ("quantized", c.c_int32),
    ]


class MxattnError(Exception):
    """A call that failed: .status and the library's message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def library_path() -> Path:
    """MXATTN_LIBRARY, or the library of ./dev build."""
    default = Path(__file__).resolve().parents[2] / "build" / "lib" / "libmxattn.so"
    return Path(os.environ.get("MXATTN_LIBRARY", default))


def _load() -> c.CDLL:
    if not library_path().is_file():
        raise FileNotFoundError(f"{library_path()}: run ./dev build, or set MXATTN_LIBRARY")
    lib = c.CDLL(str(library_path()))
    for name in ("last_error", "version", "status_name", "problem_explain", "problem_backend",
                 "simd_targets", "matrix_engine"):  # fmt: skip
        getattr(lib, f"mxattn_{name}").restype = c.c_char_p
    for name in ("problem_explain", "problem_backend", "problem_destroy"):
        getattr(lib, f"mxattn_{name}").argtypes = [c.c_void_p]
    lib.mxattn_problem_destroy.restype = None
    lib.mxattn_state_count.argtypes = [c.c_void_p, c.POINTER(c.c_int32)]
    lib.mxattn_state_at.argtypes = [c.c_void_p, c.c_int32, c.POINTER(BufferInfo)]
    lib.mxattn_workspace_bytes.argtypes = [c.c_void_p, c.POINTER(c.c_uint64)]
    lib.mxattn_plan_bytes.argtypes = [c.c_void_p, c.POINTER(c.c_uint64)]
    lib.mxattn_plan_create_on_device.argtypes = [c.c_void_p, c.c_void_p, c.POINTER(c.c_void_p)]
    lib.mxattn_plan_destroy.argtypes = [c.c_void_p]
    lib.mxattn_plan_destroy.restype = None
    for name in ("forward", "backward", "quantize", "dequantize"):
        getattr(lib, f"mxattn_{name}").argtypes = [c.c_void_p, c.c_void_p]
    return lib


lib = _load()


def check(status: int) -> None:
    if status != OK:
        raise MxattnError(status, lib.mxattn_last_error().decode())


def tensor(array) -> Tensor:
    """A view of an array of numpy or torch; without data if None."""
    view = Tensor()
    if array is None:
        return view
    if isinstance(array, np.ndarray):
        address, dtype = array.ctypes.data if array.size else None, array.dtype
        strides = [stride // array.itemsize for stride in array.strides]
    else:
        address, strides = array.data_ptr() or None, array.stride()
        dtype = np.dtype(str(array.dtype).removeprefix("torch."))
    view.data = address
    view.dtype = CODES[dtype]
    view.rank = array.ndim
    for i in range(array.ndim):
        view.shape[i] = array.shape[i]
        view.strides[i] = strides[i]
    return view


def poisoned(shape, dtype) -> np.ndarray:
    """A buffer full of NaN or -1: what a call does not write shows."""
    array = np.empty(shape, dtype)
    array.view(np.uint8 if array.itemsize == 1 else np.dtype(f"u{array.itemsize}")).fill(
        np.iinfo(np.dtype(f"u{array.itemsize}")).max
    )
    return array


def make_config(q_shape, k_shape, num_documents, *, recipe="fp8", backend="auto", causal=True,
                window=(-1, -1), softmax_scale=None, rotate=-1, threads=0,
                device=None):  # fmt: skip
    """`device` is the index of a CUDA device, None the CPU."""
    config = ProblemConfig()
    lib.mxattn_problem_config_init(c.byref(config))
    config.recipe = recipe.encode()
    config.backend = backend.encode()
    config.device_kind = CPU if device is None else CUDA
    config.device_index = device or 0
    config.total_q, config.heads_q, config.head_dim = q_shape
    config.total_k, config.heads_k = k_shape[:2]
    config.num_documents = num_documents
    config.causal = causal
    config.window_left, config.window_right = window
    config.has_softmax_scale = softmax_scale is not None
    config.softmax_scale = softmax_scale or 0.0
    config.rotate = rotate
    config.threads = threads
    return config


def can_run(config) -> tuple[bool, str]:
    yes, reason = c.c_int32(), c.c_char_p()
    check(lib.mxattn_can_run(c.byref(config), c.byref(yes), c.byref(reason)))
    return bool(yes.value), reason.value.decode()


class Attention:
    """One problem with its lengths and its saved state.

    `options` are those of make_config. cu_seqlens_k defaults to that of the queries.
    """

    def __init__(self, q_shape, k_shape, cu_seqlens_q, cu_seqlens_k=None, **options):
        self._problem = c.c_void_p()
        config = make_config(q_shape, k_shape, len(cu_seqlens_q) - 1, **options)
        check(lib.mxattn_problem_create(c.byref(config), c.byref(self._problem)))
        self.q_shape, self.k_shape = tuple(q_shape), tuple(k_shape)
        self.cu_q = self._lengths(cu_seqlens_q)
        self.cu_k = None if cu_seqlens_k is None else self._lengths(cu_seqlens_k)
        self.state = {}
        count = c.c_int32()
        check(lib.mxattn_state_count(self._problem, c.byref(count)))
        for i in range(count.value):
            info = BufferInfo(size=c.sizeof(BufferInfo))
            check(lib.mxattn_state_at(self._problem, i, c.byref(info)))
            shape = tuple(info.shape[: info.rank])
            self.state[info.name.decode()] = self._buffer(shape, DTYPES[info.dtype])
        self._buffers = (Buffer * max(1, count.value))(
            *(Buffer(tensor(array).data, array.nbytes) for array in self.state.values())
        )
        self._call = Call(
            cu_seqlens_q=tensor(self.cu_q),
            cu_seqlens_k=tensor(self.cu_k),
            state=self._buffers,
            num_state=count.value,
        )

    def __del__(self):
        if getattr(self, "_problem", None):
            lib.mxattn_problem_destroy(self._problem)

    @staticmethod
    def _lengths(cu_seqlens) -> np.ndarray:
        return np.ascontiguousarray(cu_seqlens, np.int32)

    @staticmethod
    def _buffer(shape, dtype) -> np.ndarray:
        return poisoned(shape, dtype)

    def _args(self, kind, **tensors):
        args = kind(size=c.sizeof(kind), call=self._call)
        for name, array in tensors.items():
            setattr(args, name, tensor(array))
        return args

    @property
    def backend(self) -> str:
        return lib.mxattn_problem_backend(self._problem).decode()

    @property
    def explanation(self) -> str:
        return lib.mxattn_problem_explain(self._problem).decode()

    def quantize(self, name: str, array: np.ndarray) -> None:
        args = self._args(QuantizeArgs, tensor=array)
        args.operand = OPERANDS[name]
        check(lib.mxattn_quantize(self._problem, c.byref(args)))

    def dequantize(self, name: str) -> np.ndarray:
        out = poisoned(self.q_shape if name == "q" else self.k_shape, np.float32)
        args = self._args(QuantizeArgs, tensor=out)
        args.operand = OPERANDS[name]
        check(lib.mxattn_dequantize(self._problem, c.byref(args)))
        return out

    def forward(self, q, k, v, *, out=None, lse=None, quantized=()):
        """(out, lse); `quantized` names operands that are in the state already."""
        out = poisoned(self.q_shape, bfloat16) if out is None else out
        lse = poisoned((self.q_shape[1], self.q_shape[0]), np.float32) if lse is None else lse
        args = self._args(ForwardArgs, q=q, k=k, v=v, out=out, lse=lse)
        args.quantized = sum(OPERANDS[name] for name in quantized)
        check(lib.mxattn_forward(self._problem, c.byref(args)))
        return out, lse

    def backward(self, q, k, v, out, lse, dout, *, dq=None, dk=None, dv=None):
        """(dq, dk, dv)"""
        dq = poisoned(self.q_shape, bfloat16) if dq is None else dq
        dk = poisoned(self.k_shape, bfloat16) if dk is None else dk
        dv = poisoned(self.k_shape, bfloat16) if dv is None else dv
        args = self._args(
            BackwardArgs, q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv
        )
        check(lib.mxattn_backward(self._problem, c.byref(args)))
        return dq, dk, dv


def attention(q, k, v, cu_seqlens_q, cu_seqlens_k=None, dout=None, **options) -> dict:
    """{"o", "lse"} and, with dout, {"dq", "dk", "dv"}: the whole call."""
    call = Attention(q.shape, k.shape, cu_seqlens_q, cu_seqlens_k, **options)
    out, lse = call.forward(q, k, v)
    result = {"o": out, "lse": lse}
    if dout is not None:
        gradients = call.backward(q, k, v, out, lse, dout)
        result.update(zip(("dq", "dk", "dv"), gradients, strict=True))
    return result


def recipes() -> dict[str, dict]:
    found = {}
    for i in range(lib.mxattn_recipe_count()):
        info = RecipeInfo(size=c.sizeof(RecipeInfo))
        check(lib.mxattn_recipe_at(i, c.byref(info)))
        found[info.name.decode()] = {
            "form": info.form.decode(),
            "version": info.version,
            "control": bool(info.control),
            "strictly_causal": bool(info.strictly_causal),
            "quantized": bool(info.quantized),
        }
    return found
