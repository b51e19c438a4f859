"""The functions of the package for numpy arrays; torch tensors go to mxattn.torch."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

import numpy as np

from mxattn import capi
from mxattn.capi import InvalidArgument, Plan, Problem, bfloat16, invalid


def _is_torch(array) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _torch():
    from mxattn import torch as front

    return front


# ---- arguments ---------------------------------------------------------------------------------


def _bf16(name: str, array) -> np.ndarray:
    """BF16 with a contiguous last dimension; float32 is rounded to nearest, ties to even."""
    if _is_torch(array):
        raise invalid(name, "a torch tensor", "a numpy array, as q")
    array = np.asarray(array)
    if array.dtype == np.float32:
        array = array.astype(bfloat16)
    if array.dtype != bfloat16:
        raise invalid(f"{name}.dtype", array.dtype, "float32 or ml_dtypes.bfloat16")
    size = array.itemsize
    usable = all(stride >= 0 and stride % size == 0 for stride in array.strides)
    if array.ndim and (array.strides[-1] != size or not usable):
        array = np.ascontiguousarray(array)
    return array


def _lengths(name: str, cu_seqlens) -> np.ndarray:
    array = np.asarray(cu_seqlens)
    if array.ndim != 1 or array.size < 2 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}"
        raise invalid(name, found, "integers of shape (documents + 1,), from 0, not decreasing")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise invalid(name, f"{array.min()} to {array.max()}", "values from 0 to 2^31 - 1")
    return np.ascontiguousarray(array, np.int32)


def _window(window_size) -> tuple[int, int]:
    try:
        left, right = window_size
        if int(left) == left and int(right) == right:
            return int(left), int(right)
    except (TypeError, ValueError, OverflowError):
        pass
    raise invalid("window_size", window_size, "(left, right), integers, -1 for no bound")


def _scale(softmax_scale) -> float | None:
    try:
        return None if softmax_scale is None else float(softmax_scale)
    except (TypeError, ValueError, OverflowError):
        raise invalid("softmax_scale", softmax_scale, "a number or None") from None


def _checked(plan) -> Plan | None:
    if plan is not None and not isinstance(plan, Plan):
        raise invalid("plan", type(plan).__name__, "what make_plan returned, or None")
    return plan


def _options(causal, window_size, softmax_scale, recipe) -> dict:
    """What a problem is made of besides shapes, hashable."""
    if not isinstance(recipe, str):
        raise invalid("recipe", recipe, f"one of {', '.join(capi.recipes())}")
    if not isinstance(causal, (bool, np.bool_, int)):
        raise invalid("causal", causal, "True or False")
    return {
        "causal": bool(causal),
        "window": _window(window_size),
        "softmax_scale": _scale(softmax_scale),
        "recipe": recipe,
    }


# ---- attention ---------------------------------------------------------------------------------


def attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *,
                softmax_scale=None, causal=False, window_size=(-1, -1), recipe="fp8",
                return_lse=False, plan=None):  # fmt: skip
    """Attention of packed documents.

    q: (total_q, heads_q, head_dim); k, v: (total_k, heads_k, head_dim); float32, which is rounded
    to BF16, or ml_dtypes.bfloat16. cu_seqlens: integers (documents + 1,), where each document
    begins and the last ends; the keys' default to the queries'. max_seqlen is accepted from callers
    that have it and never used.

    With offset = key length - query length, query i of a document sees key j if causal: j <= i +
    offset; and i + offset - left <= j <= i + offset + right for window_size = (left, right), -1 for
    no bound. softmax_scale defaults to 1 / sqrt(head_dim). `recipe` is a name of recipes(); `plan`
    comes from make_plan.

    Returns out, float32 of q's shape; with return_lse (out, lse), lse float32 (heads_q, total_q) in
    natural logarithms. Rows without a visible key: out 0, lse -inf. torch tensors: mxattn.torch.
    Raises InvalidArgument and Unsupported.
    """
    if _is_torch(q):
        return _torch().attn_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, recipe=recipe,
            return_lse=return_lse, plan=plan,
        )  # fmt: skip
    q, k, v = (_bf16(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    cu_q = _lengths("cu_seqlens_q", cu_seqlens_q)
    cu_k = None if cu_seqlens_k is None else _lengths("cu_seqlens_k", cu_seqlens_k)
    options = _options(causal, window_size, softmax_scale, recipe)
    problem = capi.cached_problem(q.shape, k.shape, len(cu_q) - 1, **options)
    out = np.empty(q.shape, bfloat16)
    lse = np.empty((q.shape[1], q.shape[0]), np.float32)
    state = [np.empty(buffer.shape, buffer.dtype) for buffer in problem.state]
    problem.forward(problem.call(cu_q, cu_k, state, plan=_checked(plan)), q, k, v, out, lse)
    out = out.astype(np.float32)
    return (out, lse) if return_lse else out


def attn(q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), recipe="fp8",
         return_lse=False):  # fmt: skip
    """Attention of a batch of equally long documents.

    q: (batch, tokens_q, heads_q, head_dim); k, v: (batch, tokens_k, heads_k, head_dim). Returns out
    of q's shape and, with return_lse, lse (batch, heads_q, tokens_q). All else as attn_varlen.
    """
    if _is_torch(q):
        return _torch().attn(
            q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
            recipe=recipe, return_lse=return_lse,
        )  # fmt: skip
    q, k, v = (_bf16(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise invalid(f"{name}.shape", x.shape, "(batch, tokens, heads, head_dim)")
        if x.shape[0] != q.shape[0] or x.shape[0] == 0:
            raise invalid(f"{name}.shape", x.shape, "a batch as large as that of q, at least 1")
    batch, tokens, heads, _ = q.shape
    cu_q, cu_k = (np.arange(batch + 1, dtype=np.int64) * x.shape[1] for x in (q, k))
    packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out, lse = attn_varlen(*packed, cu_q, cu_k, softmax_scale=softmax_scale, causal=causal,
                           window_size=window_size, recipe=recipe, return_lse=True)  # fmt: skip
    out = out.reshape(q.shape)
    return (out, lse.reshape(heads, batch, tokens).swapaxes(0, 1)) if return_lse else out


# ---- with the caller's buffers -----------------------------------------------------------------

LOG2_E = math.log2(math.e)
# Of a row sum: finite in FP32. What is divided by it is zero to every reader.
LARGEST_EXPONENT = 126


def _viewable(name: str, array) -> None:
    """Refuses what a Tensor of the library cannot say."""
    if not isinstance(array, np.ndarray):
        raise invalid(name, type(array).__name__, "a numpy array, as q")
    if any(stride % array.itemsize for stride in array.strides):
        raise invalid(f"{name}.strides", array.strides, f"multiples of {array.itemsize} bytes")


def _problem(q, k, cu_seqlens_q, options) -> Problem:
    """The problem of BF16 tensors of numpy or torch."""
    if _is_torch(q):
        return _torch().problem_of(q, k, cu_seqlens_q, **options)
    if not isinstance(q, np.ndarray):
        raise invalid("q", type(q).__name__, "a numpy array or a torch tensor")
    _viewable("q", q)
    _viewable("k", k)
    entries = len(_lengths("cu_seqlens_q", cu_seqlens_q))
    return capi.cached_problem(q.shape, k.shape, entries - 1, **options)


def _call(problem: Problem, q, cu_q, cu_k, state, plan, writes, **tensors):
    """What a call takes, and what it keeps alive. Lengths are int32, as the library wants them."""
    _checked(plan)
    if _is_torch(q):
        return _torch().call_of(problem, q.device, cu_q, cu_k, state, plan, **tensors)
    cu_q = _lengths("cu_seqlens_q", cu_q)
    cu_k = None if cu_k is None else _lengths("cu_seqlens_k", cu_k)
    buffers = {f"state[{i}]": x for i, x in enumerate(_buffers(state))}
    for name, x in (tensors | buffers).items():
        _viewable(name, x)
        if name.split("[")[0] in writes and not x.flags.writeable:
            raise invalid(name, "a read-only array", "one that can be written")
    return problem.call(cu_q, cu_k, state, plan=plan), (cu_q, cu_k)


def _buffers(state) -> list | tuple:
    if not isinstance(state, (list, tuple)):
        raise invalid("state", type(state).__name__, "the buffers of make_state")
    return state


def make_state(q, k, cu_seqlens_q, *, softmax_scale=None, causal=False, window_size=(-1, -1),
               recipe="fp8") -> list:  # fmt: skip
    """Buffers of the state that forward_ leaves to backward_, where q lies, in the ABI's order."""
    options = _options(causal, window_size, softmax_scale, recipe)
    problem = _problem(q, k, cu_seqlens_q, options)
    if _is_torch(q):
        return _torch().empty_state(problem, q.device)
    return [np.empty(buffer.shape, buffer.dtype) for buffer in problem.state]


def forward_(q, k, v, out, lse, state, cu_seqlens_q, cu_seqlens_k=None, *, softmax_scale=None,
             causal=False, window_size=(-1, -1), recipe="fp8", plan=None) -> None:  # fmt: skip
    """The forward into the caller's buffers: no conversion, no allocation, no autograd.

    BF16 q, k, v as in attn_varlen and out as q; lse float32 (heads_q, total_q); state from
    make_state with the same options. The last dimension is contiguous, other strides are free.
    """
    options = _options(causal, window_size, softmax_scale, recipe)
    problem = _problem(q, k, cu_seqlens_q, options)
    call, _keep = _call(problem, q, cu_seqlens_q, cu_seqlens_k, state, plan,
                        ("out", "lse", "state"), k=k, v=v, out=out, lse=lse)  # fmt: skip
    problem.forward(call, q, k, v, out, lse)


def backward_(dout, q, k, v, out, lse, state, dq, dk, dv, cu_seqlens_q, cu_seqlens_k=None, *,
              softmax_scale=None, causal=False, window_size=(-1, -1), recipe="fp8", plan=None,
              merged_lse=None) -> None:  # fmt: skip
    """The backward into the caller's buffers: BF16 dq as q, dk and dv as k.

    Takes what forward_ took and wrote, with the same options; reads the state. With merged_lse,
    float32 (heads_q, total_q), k and v are a part of the keys: merged_lse and out are those over
    all of them (merge_lse), lse and state those of this part, and dq is this part's addend.
    """
    options = _options(causal, window_size, softmax_scale, recipe)
    problem = _problem(q, k, cu_seqlens_q, options)
    if merged_lse is not None:
        state = _state_of_part(state, merged_lse, recipe)
    call, _keep = _call(problem, q, cu_seqlens_q, cu_seqlens_k, state, plan, ("dq", "dk", "dv"),
                        k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv)  # fmt: skip
    problem.backward(call, q, k, v, out, lse, dout, dq, dk, dv)


def _state_of_part(state, merged_lse, recipe) -> list:
    """The state with the row sums of all keys, relative to the references of this part.

    L = 2^(log2(e) lse - mu) for any mu that no score exceeds. The part's own is the nearest: its
    weights 2^(z - mu) fill the range of their codes, also where the part hardly counts.
    """
    if recipe == "exact":
        raise invalid(
            "recipe", recipe, "another with merged_lse: D is that of the keys it is given"
        )
    if len(_buffers(state)) < 2 or not all(hasattr(x, "shape") for x in (*state, merged_lse)):
        raise invalid("state, merged_lse", f"{len(state)} buffers, {type(merged_lse).__name__}",
                      "the buffers of make_state and an array as lse")  # fmt: skip
    *operands, reference, own = state
    if _is_torch(merged_lse) != _is_torch(own):
        raise invalid("merged_lse", type(merged_lse).__name__, f"{type(own).__name__}, as state")
    if tuple(merged_lse.shape) != tuple(own.shape):
        raise invalid("merged_lse.shape", tuple(merged_lse.shape), f"{tuple(own.shape)}, as lse")
    if merged_lse.dtype != own.dtype:
        raise invalid("merged_lse.dtype", merged_lse.dtype, f"{own.dtype}, as lse")
    if _is_torch(own):
        sums = _torch().merged_sums(reference, merged_lse)
    else:
        exponent = np.asarray(merged_lse, np.float64) * LOG2_E - reference
        sums = np.exp2(np.minimum(exponent, LARGEST_EXPONENT)).astype(np.float32)
    return [*operands, reference, sums]


def make_plan(cu_seqlens_q, cu_seqlens_k=None, *, heads_q, head_dim, heads_k=None, total_q=None,
              total_k=None, causal=False, window_size=(-1, -1), recipe="fp8") -> Plan:  # fmt: skip
    """Work lists of a microbatch, made once and named by the calls of all its layers.

    heads_k defaults to heads_q; total_q and total_k, the rows of q and k, to where the last
    document ends (on a device they must be given). Serves calls with these lengths, shapes and
    mask. Keep the plan until the last backward is done. Never changes results.
    """
    options = _options(causal, window_size, None, recipe)
    heads_k = heads_q if heads_k is None else heads_k
    if _is_torch(cu_seqlens_q):
        return _torch().make_plan(
            cu_seqlens_q, cu_seqlens_k, (total_q, heads_q, head_dim), (total_k, heads_k, head_dim),
            options,
        )  # fmt: skip
    cu_q = _lengths("cu_seqlens_q", cu_seqlens_q)
    cu_k = cu_q if cu_seqlens_k is None else _lengths("cu_seqlens_k", cu_seqlens_k)
    total_q = int(cu_q[-1]) if total_q is None else total_q
    total_k = int(cu_k[-1]) if total_k is None else total_k
    q_shape, k_shape = (total_q, heads_q, head_dim), (total_k, heads_k, head_dim)
    problem = capi.cached_problem(q_shape, k_shape, len(cu_q) - 1, **options)
    return problem.make_plan(cu_q, None if cu_seqlens_k is None else cu_k)


# ---- operands ----------------------------------------------------------------------------------


@dataclass
class Quantized:
    """An operand as the kernels see it: `buffers` by name ("codes", "exponents", ...).

    Documents lie at multiples of 16 slots: codes E4M3 (heads, slots, head_dim), exponents int8
    (heads, slots).
    """

    operand: str
    recipe: str
    buffers: dict
    _problem: Problem = field(repr=False)
    _state: list = field(repr=False)
    _lengths: np.ndarray = field(repr=False)


def quantize(x, cu_seqlens, operand="k", *, recipe="fp8", softmax_scale=None) -> Quantized:
    """Quantises x (tokens, heads, head_dim) as attention with this recipe quantises q, k or v."""
    if operand not in list(capi.OPERANDS):
        raise invalid("operand", operand, "q, k or v")
    if _is_torch(x):
        raise invalid("x", "a torch tensor", "a numpy array; for BF16: x.float().numpy()")
    x, cu = _bf16("x", x), _lengths("cu_seqlens", cu_seqlens)
    options = _options(False, (-1, -1), softmax_scale, recipe)
    problem = capi.cached_problem(x.shape, x.shape, len(cu) - 1, **options)
    state = [np.empty(buffer.shape, buffer.dtype) for buffer in problem.state]
    problem.quantize(problem.call(cu, None, state), operand, x)
    buffers = {
        buffer.name.removeprefix(f"{operand}_"): array
        for buffer, array in zip(problem.state, state, strict=True)
        if buffer.name.startswith(f"{operand}_")
    }
    return Quantized(operand, recipe, buffers, problem, state, cu)


def dequantize(quantized: Quantized, *, rotate_back=True) -> np.ndarray:
    """The values that codes and exponents stand for, float32 (tokens, heads, head_dim).

    rotate_back undoes the rotation of q and k where the recipe rotates. NaN for tokens that held
    NaN or infinity, 0 outside the documents.
    """
    problem = quantized._problem
    out = np.empty(problem.q_shape, np.float32)
    call = problem.call(quantized._lengths, None, quantized._state)
    problem.dequantize(call, quantized.operand, out, bool(rotate_back))
    return out


# ---- what can run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """True or False, with the reason if it is False."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def can_run(q_shape, k_shape=None, num_documents=1, *, causal=False, window_size=(-1, -1),
            softmax_scale=None, recipe="fp8", backend="auto", device=None) -> Verdict:  # fmt: skip
    """Whether attn_varlen would run tensors of these shapes, else why not. Never raises.

    k_shape defaults to q_shape; `device` is the index of a CUDA device, None the CPU.
    """
    try:
        options = _options(causal, window_size, softmax_scale, recipe)
        k_shape = q_shape if k_shape is None else k_shape
        config = capi.make_config(
            q_shape, k_shape, num_documents, backend=backend, device=device, **options
        )
        return Verdict(*capi.can_run(config))
    except InvalidArgument as error:
        return Verdict(False, str(error))


def explain(q_shape, k_shape=None, num_documents=1, *, causal=False, window_size=(-1, -1),
            softmax_scale=None, recipe="fp8", backend="auto", device=None) -> str:  # fmt: skip
    """For people: recipe, backend and why it was chosen, tiles, instructions, memory."""
    options = _options(causal, window_size, softmax_scale, recipe)
    k_shape = q_shape if k_shape is None else k_shape
    config = capi.make_config(
        q_shape, k_shape, num_documents, backend=backend, device=device, **options
    )
    return Problem(config).explanation


# ---- helpers -----------------------------------------------------------------------------------


def cu_seqlens_from_lengths(lengths):
    """(documents,) lengths -> (documents + 1,) int32 offsets from 0.

    A torch tensor gives a tensor on its device, without looking at the values.
    """
    if _is_torch(lengths):
        return _torch().cu_seqlens_from_lengths(lengths)
    array = np.asarray(lengths)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise invalid("lengths", f"{array.dtype} of shape {array.shape}", "integers (documents,)")
    if array.min() < 0:
        raise invalid(f"lengths[{array.argmin()}]", array.min(), "at least 0")
    array = np.minimum(array.astype(np.uint64), 2**31)  # so that sums do not wrap
    return _lengths("cu_seqlens", np.concatenate([[0], np.cumsum(array, dtype=np.int64)]))


def cu_seqlens_from_position_ids(position_ids):
    """Positions (tokens,) or (1, tokens), from 0 a document -> int32 offsets (documents + 1,).

    Checks that the first is 0 and that each is 0 or one more than the one before. A torch tensor
    gives a tensor on its device; there the number of documents must be read, which waits for it.
    """
    if _is_torch(position_ids):
        offsets = cu_seqlens_from_position_ids(position_ids.detach().cpu().numpy())
        return _torch().tensor_on(offsets, position_ids.device)
    array = np.asarray(position_ids)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        found = f"{array.dtype} of shape {array.shape}"
        raise invalid("position_ids", found, "integers (tokens,) or (1, tokens)")
    if array[0] != 0:
        raise invalid("position_ids[0]", array[0], "0")
    wrong = (array[1:] != 0) & (array[1:] != array[:-1].astype(np.int64) + 1)
    if wrong.any():
        at = int(wrong.argmax()) + 1
        raise invalid(f"position_ids[{at}]", array[at], f"0 or {int(array[at - 1]) + 1}")
    return _lengths("cu_seqlens", np.append(np.flatnonzero(array == 0), array.size))


def merge_lse(out_a, lse_a, out_b, lse_b):
    """Attention over two sets of keys from the attention over each: (out, lse).

    out: (tokens, heads, head_dim); lse: (heads, tokens), natural logarithms. Computed in float32.
    """
    if _is_torch(out_a):
        return _torch().merge_lse(out_a, lse_a, out_b, lse_b)
    for name, x in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if _is_torch(x):
            raise invalid(name, "a torch tensor", "a numpy array, as out_a")
    out_a, lse_a, out_b, lse_b = (np.asarray(x, np.float32) for x in (out_a, lse_a, out_b, lse_b))
    for name, x, like in (("out_b", out_b, out_a), ("lse_b", lse_b, lse_a)):
        if x.shape != like.shape:
            raise invalid(f"{name}.shape", x.shape, f"{like.shape}")
    if out_a.ndim != 3 or lse_a.shape != out_a.shape[1::-1]:
        raise invalid("lse_a.shape", lse_a.shape, "(heads, tokens) of out (tokens, heads, dim)")
    top = np.maximum(lse_a, lse_b)
    top = np.where(np.isneginf(top), np.float32(0), top)
    a, b = np.exp(lse_a - top), np.exp(lse_b - top)
    total = a + b
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    share = np.where(total == 0, np.float32(1), total)
    weights = (x.T[..., None] for x in (a / share, b / share))
    return out_a * next(weights) + out_b * next(weights), lse
