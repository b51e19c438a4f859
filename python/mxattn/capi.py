"""The C ABI of mxattn.h and plan.h through ctypes: structs, the library, problems and plans.

Tensors are numpy arrays or torch tensors of (tokens, heads, dim) with any strides but a contiguous
last dimension; BF16 is ml_dtypes.bfloat16 in numpy. Nothing here allocates or converts tensors.
"""

from __future__ import annotations

import array
import ctypes as c
import functools
import itertools
import operator
import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)

OK, INVALID_ARGUMENT, UNSUPPORTED, INTERNAL = 0, 1, 2, 5
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
        ("rotate_back", c.c_int32),
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
    """A call that failed: the library's message, and .status.

    Made of the message alone: so copies, pickles and hosts that add text make an error again.
    """

    status = INTERNAL


class InvalidArgument(MxattnError, ValueError):
    """An argument is wrong; the message names it, its value and what was expected."""

    status = INVALID_ARGUMENT


class Unsupported(MxattnError, NotImplementedError):
    """The arguments are legal, but no backend of this build and machine can run them."""

    status = UNSUPPORTED


_ERRORS = {INVALID_ARGUMENT: InvalidArgument, UNSUPPORTED: Unsupported}


def invalid(argument: str, value, expectation: str) -> InvalidArgument:
    """The error of a check on this side of the ABI, in the library's own words."""
    return InvalidArgument(f"{argument} = {value}: expected {expectation}")


def unsupported(argument: str, value, expectation: str) -> Unsupported:
    """The same for what is legal and not here."""
    return Unsupported(f"{argument} = {value}: expected {expectation}")


def library_path() -> Path:
    """MXATTN_LIBRARY, else the library inside the package, else that of ./dev build."""
    if named := os.environ.get("MXATTN_LIBRARY"):
        return Path(named)
    package = Path(__file__).resolve().parent
    inside = package / "lib" / "libmxattn.so"
    return inside if inside.is_file() else package.parents[1] / "build" / "lib" / "libmxattn.so"


def _load() -> c.CDLL:
    path = library_path()
    if not path.is_file():
        raise ImportError(f"{path}: no such library: run ./dev build, or set MXATTN_LIBRARY")
    lib = c.CDLL(str(path))
    for name in ("last_error", "version", "status_name", "problem_explain", "problem_backend",
                 "simd_targets", "matrix_engine"):  # fmt: skip
        getattr(lib, f"mxattn_{name}").restype = c.c_char_p
    for name in ("problem_explain", "problem_backend", "problem_destroy", "plan_destroy"):
        getattr(lib, f"mxattn_{name}").argtypes = [c.c_void_p]
    lib.mxattn_problem_destroy.restype = None
    lib.mxattn_plan_destroy.restype = None
    lib.mxattn_state_count.argtypes = [c.c_void_p, c.POINTER(c.c_int32)]
    lib.mxattn_state_at.argtypes = [c.c_void_p, c.c_int32, c.POINTER(BufferInfo)]
    lib.mxattn_workspace_bytes.argtypes = [c.c_void_p, c.POINTER(c.c_uint64)]
    lib.mxattn_plan_bytes.argtypes = [c.c_void_p, c.POINTER(c.c_uint64)]
    lib.mxattn_plan_create.argtypes = [c.c_void_p] * 3 + [c.POINTER(c.c_void_p)]
    lib.mxattn_plan_create_on_device.argtypes = [c.c_void_p, c.c_void_p, c.POINTER(c.c_void_p)]
    for name in ("forward", "backward", "quantize", "dequantize"):
        getattr(lib, f"mxattn_{name}").argtypes = [c.c_void_p, c.c_void_p]
    return lib


lib = _load()


def check(status: int) -> None:
    if status != OK:
        error = _ERRORS.get(status, MxattnError)(lib.mxattn_last_error().decode())
        error.status = status
        raise error


@functools.lru_cache(maxsize=64)
def _code(dtype) -> int:
    """The ABI's number for a dtype of numpy or torch; 0, which it refuses by name, for others."""
    try:
        return CODES.get(np.dtype(str(dtype).removeprefix("torch.")), 0)
    except TypeError:
        return 0


# The arguments of a call are one struct.pack of numbers: a third of the time that ctypes takes to
# fill nested structs. The structs above say what the numbers mean; a test compares the two.
_TENSOR_FORMAT = f"Pii{2 * MAX_RANK}q"
_CALL_FORMAT = f"{2 * _TENSOR_FORMAT}PiiPQPP"
_pack_forward = struct.Struct(f"Q{_CALL_FORMAT}{5 * _TENSOR_FORMAT}ii").pack
_pack_backward = struct.Struct(f"Q{_CALL_FORMAT}{9 * _TENSOR_FORMAT}").pack
_pack_quantize = struct.Struct(f"Q{_CALL_FORMAT}{_TENSOR_FORMAT}ii").pack
_FORWARD_SIZE, _BACKWARD_SIZE = c.sizeof(ForwardArgs), c.sizeof(BackwardArgs)
_QUANTIZE_SIZE = c.sizeof(QuantizeArgs)
_NO_TENSOR = (0,) * (3 + 2 * MAX_RANK)
_PADDING = tuple((0,) * (MAX_RANK - rank) for rank in range(MAX_RANK + 1))


def _view(x) -> tuple[int, ...]:
    """The fields of the Tensor that views an array of numpy or torch; without data if None."""
    if x is None:
        return _NO_TENSOR
    rank = x.ndim
    if rank > MAX_RANK:
        raise invalid("tensor.rank", rank, f"at most {MAX_RANK}")
    if isinstance(x, np.ndarray):
        address = x.ctypes.data if x.size else 0
        strides = [stride // x.itemsize for stride in x.strides]
    else:
        address, strides = x.data_ptr(), x.stride()
    padding = _PADDING[rank]
    return address, _code(x.dtype), rank, *x.shape, *padding, *strides, *padding


def _is_contiguous(x) -> bool:
    return x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous()


def tensor(x) -> Tensor:
    """A view of an array of numpy or torch; without data if None."""
    fields = _view(x)
    return Tensor(*fields[:3], fields[3 : 3 + MAX_RANK], fields[3 + MAX_RANK :])


def _int32(name: str, value) -> int:
    """value, which ctypes would cut to 32 bits without a word."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(name, value, "an integer") from None
    if not -(2**31) <= number < 2**31:
        raise invalid(name, number, "an integer of 32 bits")
    return number


def _name(argument: str, value) -> bytes:
    """value, which a C string would end at its first NUL."""
    if not isinstance(value, str) or not value.isprintable():
        raise invalid(argument, repr(value), "a name")
    return value.encode()


def _shape(name: str, shape) -> tuple[int, int, int]:
    try:
        tokens, heads, dim = (operator.index(size) for size in shape)
    except (TypeError, ValueError):
        found = tuple(shape) if hasattr(shape, "__iter__") else shape
        raise invalid(f"{name}.shape", found, "(tokens, heads, head_dim)") from None
    if not -(2**63) <= tokens < 2**63:
        raise invalid(f"{name}.shape", (tokens, heads, dim), "sizes of 64 bits")
    return tokens, _int32(f"heads_{name}", heads), _int32("head_dim", dim)


def make_config(q_shape, k_shape, num_documents, *, recipe="fp8", backend="auto", causal=False,
                window=(-1, -1), softmax_scale=None, rotate=-1, threads=0,
                device=None):  # fmt: skip
    """`device` is the index of a CUDA device, None the CPU."""
    q_shape, k_shape = _shape("q", q_shape), _shape("k", k_shape)
    if k_shape[2] != q_shape[2]:
        raise invalid("k.shape", k_shape, f"a head dimension of {q_shape[2]}, as q")
    config = ProblemConfig()
    lib.mxattn_problem_config_init(c.byref(config))
    config.recipe = _name("recipe", recipe)
    config.backend = _name("backend", backend)
    config.device_kind = CPU if device is None else CUDA
    config.device_index = 0 if device is None else _int32("device", device)
    config.total_q, config.heads_q, config.head_dim = q_shape
    config.total_k, config.heads_k = k_shape[:2]
    config.num_documents = _int32("num_documents", num_documents)
    config.causal = causal
    config.window_left = _int32("window_left", window[0])
    config.window_right = _int32("window_right", window[1])
    config.has_softmax_scale = softmax_scale is not None
    config.softmax_scale = softmax_scale or 0.0
    config.rotate = rotate
    config.threads = _int32("threads", threads)
    return config


def can_run(config) -> tuple[bool, str]:
    yes, reason = c.c_int32(), c.c_char_p()
    check(lib.mxattn_can_run(c.byref(config), c.byref(yes), c.byref(reason)))
    return bool(yes.value), reason.value.decode()


@dataclass(frozen=True)
class StateBuffer:
    """One buffer of the saved state, and where it lies if the state is one block of bytes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def _aligned(size: int) -> int:
    return (size + 255) & ~255


class CallInputs:
    """What a mxattn_call holds. Keeps the array of state buffers, not the memory they name."""

    __slots__ = ("lengths", "plan", "state", "stream", "workspace", "workspace_bytes")

    def fields(self) -> tuple[int, ...]:
        state, count = self.state.buffer_info()
        return (*self.lengths, state, count // 2, 0, self.workspace, self.workspace_bytes,
                self.stream, self.plan)  # fmt: skip


class _Owner:
    """What owns a handle of the library and never changes: a copy is the object itself."""

    def _owns(self, handle: c.c_void_p, destroy) -> None:
        # NOTE: Not at exit, where daemon threads may still be inside calls that use the handle.
        weakref.finalize(self, destroy, handle).atexit = False

    def __copy__(self):
        return self

    def __deepcopy__(self, _memo):
        return self

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled: make one where it is used")


class Problem(_Owner):
    """A checked configuration. May be used by several threads at once."""

    def __init__(self, config: ProblemConfig):
        self._handle = c.c_void_p()
        check(lib.mxattn_problem_create(c.byref(config), c.byref(self._handle)))
        self._owns(self._handle, lib.mxattn_problem_destroy)
        self.q_shape = (config.total_q, config.heads_q, config.head_dim)
        self.k_shape = (config.total_k, config.heads_k, config.head_dim)
        self.num_documents = config.num_documents
        count, size = c.c_int32(), c.c_uint64()
        check(lib.mxattn_state_count(self._handle, c.byref(count)))
        self.state: list[StateBuffer] = []
        self.state_bytes = 0
        for i in range(count.value):
            info = BufferInfo(size=c.sizeof(BufferInfo))
            check(lib.mxattn_state_at(self._handle, i, c.byref(info)))
            shape = tuple(info.shape[: info.rank])
            name, dtype = info.name.decode(), DTYPES[info.dtype]
            self.state.append(StateBuffer(name, dtype, shape, info.bytes, self.state_bytes))
            self.state_bytes += _aligned(info.bytes)
        self._places = [(buffer.offset, buffer.nbytes) for buffer in self.state]
        check(lib.mxattn_workspace_bytes(self._handle, c.byref(size)))
        self.workspace_bytes = size.value

    @property
    def backend(self) -> str:
        return lib.mxattn_problem_backend(self._handle).decode()

    @property
    def explanation(self) -> str:
        return lib.mxattn_problem_explain(self._handle).decode()

    def call(self, cu_seqlens_q, cu_seqlens_k, state, *, workspace=None, stream=None,
             plan=None) -> CallInputs:  # fmt: skip
        """`state`: an array a buffer of .state, or the address of .state_bytes in one block."""
        if isinstance(state, int):
            buffers = [x for offset, size in self._places for x in (state + offset, size)]
        else:
            for i, buffer in enumerate(state):
                if not _is_contiguous(buffer):
                    raise invalid(f"state[{i}]", "a strided view", "contiguous memory")
            buffers = [x for buffer in state for x in (_view(buffer)[0], buffer.nbytes)]
        call = CallInputs()
        call.lengths = _view(cu_seqlens_q) + _view(cu_seqlens_k)
        call.state = array.array("Q", buffers)
        call.workspace = call.workspace_bytes = call.stream = call.plan = 0
        if workspace is not None:
            call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.nbytes
        if stream is not None:
            call.stream = stream
        if plan is not None:
            call.plan = plan.handle.value
        return call

    def forward(self, call: CallInputs, q, k, v, out, lse, quantized=()) -> None:
        """Writes out and lse; `quantized` names operands that are in the state already."""
        done = sum(OPERANDS[name] for name in quantized) if quantized else 0
        args = _pack_forward(_FORWARD_SIZE, *call.fields(), *_view(q), *_view(k), *_view(v),
                             *_view(out), *_view(lse), done, 0)  # fmt: skip
        check(lib.mxattn_forward(self._handle, args))

    def backward(self, call: CallInputs, q, k, v, out, lse, dout, dq, dk, dv) -> None:
        """Writes dq, dk and dv."""
        args = _pack_backward(_BACKWARD_SIZE, *call.fields(), *_view(q), *_view(k), *_view(v),
                              *_view(out), *_view(lse), *_view(dout), *_view(dq), *_view(dk),
                              *_view(dv))  # fmt: skip
        check(lib.mxattn_backward(self._handle, args))

    def quantize(self, call: CallInputs, operand: str, x) -> None:
        """Writes an operand ("q", "k" or "v") of the state."""
        args = _pack_quantize(_QUANTIZE_SIZE, *call.fields(), *_view(x), OPERANDS[operand], 0)
        check(lib.mxattn_quantize(self._handle, args))

    def dequantize(self, call: CallInputs, operand: str, out, rotate_back: bool = False) -> None:
        """Writes the values that an operand of the state stands for to out, F32."""
        args = _pack_quantize(_QUANTIZE_SIZE, *call.fields(), *_view(out), OPERANDS[operand],
                              rotate_back)  # fmt: skip
        check(lib.mxattn_dequantize(self._handle, args))

    def make_plan(self, cu_seqlens_q, cu_seqlens_k=None) -> Plan:
        """Work lists on the CPU, from checked lengths."""
        lengths = [tensor(cu_seqlens_q), tensor(cu_seqlens_k)]
        handle = c.c_void_p()
        status = lib.mxattn_plan_create(
            self._handle, c.byref(lengths[0]), c.byref(lengths[1]), c.byref(handle)
        )
        check(status)
        return Plan(handle)

    def make_device_plan(self, cu_seqlens_q, cu_seqlens_k, memory, workspace, stream) -> Plan:
        """Enqueues the making of work lists on a stream of a CUDA device."""
        args = DevicePlanArgs(
            c.sizeof(DevicePlanArgs),
            tensor(cu_seqlens_q),
            tensor(cu_seqlens_k),
            memory.data_ptr(),
            memory.nbytes,
            None if workspace is None else workspace.data_ptr(),
            0 if workspace is None else workspace.nbytes,
            stream,
        )
        handle = c.c_void_p()
        status = lib.mxattn_plan_create_on_device(self._handle, c.byref(args), c.byref(handle))
        check(status)
        return Plan(handle, (cu_seqlens_q, cu_seqlens_k, memory))

    @property
    def plan_bytes(self) -> int:
        """Device memory that make_device_plan needs."""
        size = c.c_uint64()
        check(lib.mxattn_plan_bytes(self._handle, c.byref(size)))
        return size.value


class Plan(_Owner):
    """Work lists of a microbatch, made once for all its layers. Keep it until the last backward.

    `key` names it where only numbers pass: Plan.of(key) finds it while it lives.
    """

    _next = itertools.count(1)
    _living: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()

    def __init__(self, handle: c.c_void_p, keep=()):
        self.handle = handle
        self.key = next(Plan._next)
        self.token = None  # the key as a tensor, where torch made the plan
        self.memory = self.stream = None  # where torch made it on a device: its own, and whose
        self._keep = keep
        Plan._living[self.key] = self
        self._owns(handle, lib.mxattn_plan_destroy)

    @classmethod
    def of(cls, key: int) -> Plan:
        plan = cls._living.get(key)
        if plan is None:
            raise invalid("plan", key, "a plan that is kept until the last backward is done")
        return plan


@functools.lru_cache(maxsize=256)
def cached_problem(q_shape, k_shape, num_documents, **options) -> Problem:
    """The problem of make_config's arguments: the same object for the same arguments."""
    return Problem(make_config(q_shape, k_shape, num_documents, **options))


def recipes() -> dict[str, dict]:
    """Every recipe by name: form, summary, version, control, strictly_causal, quantized."""
    found = {}
    for i in range(lib.mxattn_recipe_count()):
        info = RecipeInfo(size=c.sizeof(RecipeInfo))
        check(lib.mxattn_recipe_at(i, c.byref(info)))
        found[info.name.decode()] = {
            "form": info.form.decode(),
            "summary": info.summary.decode(),
            "version": info.version,
            "control": bool(info.control),
            "strictly_causal": bool(info.strictly_causal),
            "quantized": bool(info.quantized),
        }
    return found
