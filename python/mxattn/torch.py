"""The functions of the package for torch tensors, as operators with autograd.

`mxattn::forward` and `mxattn::backward` are operators of torch.library: they have fake versions for
torch.compile and save their state as tensors. Nothing here reads a value of a tensor on a device,
so no call waits for it.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad

from mxattn import capi
from mxattn.capi import Plan, Problem, invalid, unsupported
from mxattn.frontend import LARGEST_EXPONENT, LOG2_E, _buffers, _checked, _options

_library = torch.library.Library("mxattn", "DEF")
_MASK_AND_RECIPE = (
    "float? softmax_scale, bool causal, int window_left, int window_right, str recipe"
)
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"Tensor? plan, {_MASK_AND_RECIPE}) -> (Tensor out, Tensor lse, Tensor state)"
)
_library.define(
    "backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor state, "
    f"Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? plan, {_MASK_AND_RECIPE}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


INT32_MAX = 2**31 - 1
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# ---- problems and calls ------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _problem(q_shape, k_shape, entries, device, softmax_scale, causal, left, right, recipe):
    if entries < 2:
        raise invalid("cu_seqlens_q.shape", (entries,), "(documents + 1,)")
    return capi.cached_problem(
        tuple(q_shape), tuple(k_shape), entries - 1, causal=causal, window=(left, right),
        softmax_scale=softmax_scale, recipe=recipe, device=_device_index(device),
    )  # fmt: skip


def problem_of(q, k, cu_seqlens_q, *, softmax_scale, causal, window, recipe) -> Problem:
    """The problem of tensors of these shapes on their device."""
    _same_device(q.device, k=k, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_q.ndim != 1:
        raise invalid("cu_seqlens_q.shape", tuple(cu_seqlens_q.shape), "(documents + 1,)")
    return _problem(q.shape, k.shape, cu_seqlens_q.shape[0], q.device, softmax_scale, causal,
                    *window, recipe)  # fmt: skip


def _device_index(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise invalid("q.device", device, "cpu or cuda")
    return torch.cuda.current_device() if device.index is None else device.index


def _stream(device: torch.device) -> int | None:
    # What compiled graphs call for the same number: no object, a tenth of the time.
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def _workspace(problem: Problem, device: torch.device) -> torch.Tensor | None:
    """Memory of the current stream: the allocator hands it out again behind this call's work."""
    size = problem.workspace_bytes
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None


def _same_device(device: torch.device, **tensors) -> None:
    for name, x in tensors.items():
        if getattr(x, "device", None) != device:
            if not isinstance(x, torch.Tensor):
                raise invalid(name, type(x).__name__, "a torch tensor, as q")
            raise invalid(f"{name}.device", x.device, f"{device}, as q")


def call_of(problem: Problem, device, cu_q, cu_k, state, plan, **tensors):
    """What a call takes, and what it keeps alive. `state`: buffers, or one block of bytes.

    Checks that `tensors`, all others of the call, lie on the device.
    """
    _same_device(device, cu_seqlens_q=cu_q, **tensors)
    if cu_k is not None:
        _same_device(device, cu_seqlens_k=cu_k)
        # An empty tensor has no address, which would mean: as the queries'.
        if cu_k.shape != cu_q.shape:
            raise invalid("cu_seqlens_k.shape", tuple(cu_k.shape),
                          f"{tuple(cu_q.shape)}, as cu_seqlens_q")  # fmt: skip
    block = isinstance(state, torch.Tensor)
    if not block:
        _same_device(device, **{f"state[{i}]": x for i, x in enumerate(_buffers(state))})
    elif state.device != device:
        raise invalid("state.device", state.device, f"{device}, as q")
    elif state.nbytes < problem.state_bytes:
        raise invalid("state.nbytes", state.nbytes, f"at least {problem.state_bytes}")
    elif not state.is_contiguous():
        raise invalid("state", "a strided view", "contiguous memory")
    workspace, stream = _workspace(problem, device), _stream(device)
    if plan is not None and plan.stream != stream and plan.memory is not None:
        # Else its memory could go to others of its own stream while this one still reads it.
        plan.memory.record_stream(torch.cuda.current_stream(device))
    call = problem.call(
        cu_q, cu_k, state.data_ptr() if block else state, workspace=workspace, stream=stream,
        plan=plan,
    )  # fmt: skip
    return call, workspace


def empty_state(problem: Problem, device) -> list[torch.Tensor]:
    return [
        torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype.name), device=device)
        for buffer in problem.state
    ]


# ---- operators ---------------------------------------------------------------------------------


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def _plan(token: torch.Tensor | None) -> Plan | None:
    if token is None:
        return None
    if token.numel() != 1:
        raise invalid("plan.shape", tuple(token.shape), "that of Plan.token")
    return Plan.of(token.item())  # a tensor of the CPU


def _forward(q, k, v, cu_q, cu_k, plan, softmax_scale, causal, left, right, recipe):
    problem = _problem(q.shape, k.shape, cu_q.shape[0], q.device, softmax_scale, causal, left,
                       right, recipe)  # fmt: skip
    q, k, v = _unit(q), _unit(k), _unit(v)
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    state = q.new_empty(problem.state_bytes, dtype=torch.uint8)
    call, _keep = call_of(problem, q.device, cu_q, cu_k, state, _plan(plan), k=k, v=v)
    problem.forward(call, q, k, v, out, lse)
    return out, lse, state


def _backward(dout, q, k, v, out, lse, state, cu_q, cu_k, plan, softmax_scale, causal, left, right,
              recipe):  # fmt: skip
    problem = _problem(q.shape, k.shape, cu_q.shape[0], q.device, softmax_scale, causal, left,
                       right, recipe)  # fmt: skip
    q, k, v, out, dout = (_unit(x) for x in (q, k, v, out, dout))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    call, _keep = call_of(problem, q.device, cu_q, cu_k, state, _plan(plan), k=k, v=v, out=out,
                          lse=lse, dout=dout)  # fmt: skip
    problem.backward(call, q, k, v, out, lse.contiguous(), dout, dq, dk, dv)
    return dq, dk, dv


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)


@torch.library.register_fake("mxattn::forward", lib=_library)
def _(q, k, v, cu_q, cu_k, plan, softmax_scale, causal, left, right, recipe):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    sizes = (*q.shape, *k.shape, cu_q.shape[0])
    if all(isinstance(size, int) for size in sizes):
        problem = _problem(q.shape, k.shape, cu_q.shape[0], q.device, softmax_scale, causal, left,
                           right, recipe)  # fmt: skip
        size = problem.state_bytes
    else:  # one graph serves every length: the size is known when it runs
        size = torch.library.get_ctx().new_dynamic_size()
    return out, lse, torch.empty(size, dtype=torch.uint8, device=q.device)


@torch.library.register_fake("mxattn::backward", lib=_library)
def _(dout, q, k, v, *_):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, cu_q, cu_k, plan, *ctx.options = inputs
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, state = torch.ops.mxattn.forward.default(*inputs)
        ctx.mark_non_differentiable(lse, state)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, state, cu_q, cu_k, plan)
        return out, lse, state

    @staticmethod
    def backward(ctx, dout, _dlse, _dstate):
        if dout is None:
            return (None,) * 11
        q, k, v, out, lse, state, cu_q, cu_k, plan = ctx.saved_tensors
        # As torch.ops.mxattn.backward, entered behind the dispatcher's first turn.
        grads = _gradients(dout, q, k, v, out, lse, state, cu_q, cu_k, plan, *ctx.options)
        return *grads, *(None,) * 8


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.mxattn.backward.default(*inputs)

    @staticmethod
    def backward(ctx, *_):
        raise unsupported("create_graph", True, "gradients of first order")


def _with_autograd(name: str, function):
    """Makes an operator differentiable: what torch.library.register_autograd does in less time."""
    operator = getattr(torch.ops.mxattn, name).default

    def run(*inputs):
        tracked = torch._C._any_requires_grad(*inputs) and torch.is_grad_enabled()
        # torch.func and forward mode come as tensors that may ask for no gradient: the Function
        # refuses them.
        if tracked or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    _library.impl(name, run, "Autograd")
    return run


_with_autograd("forward", _Attention)
_gradients = _with_autograd("backward", _Gradient)


def _no_vmap(info, in_dims, *_):
    raise unsupported("vmap", "a batch", "tensors; pack documents or use attn")


for _name in ("forward", "backward"):
    torch.library.register_vmap(f"mxattn::{_name}", _no_vmap, lib=_library)


# ---- functions ---------------------------------------------------------------------------------


def _int32(name: str, cu_seqlens):
    if not isinstance(cu_seqlens, torch.Tensor):
        raise invalid(name, type(cu_seqlens).__name__, "an int32 tensor on the device of q")
    if cu_seqlens.ndim != 1:
        raise invalid(f"{name}.shape", tuple(cu_seqlens.shape), "(documents + 1,)")
    if cu_seqlens.dtype == torch.int64:
        # What does not fit becomes what no pack has: it is refused as it would be without reading.
        return cu_seqlens.clamp(-1, INT32_MAX).to(torch.int32)
    return cu_seqlens


def attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *,
                softmax_scale=None, causal=False, window_size=(-1, -1), recipe="fp8",
                return_lse=False, plan=None):  # fmt: skip
    """mxattn.attn_varlen for torch, with gradients for q, k and v.

    q: (total_q, heads_q, head_dim); k, v: (total_k, heads_k, head_dim); bfloat16 (under autocast,
    any float), any strides. cu_seqlens: int32 (documents + 1,) on the device of q; int64 is
    converted. Returns out, bfloat16 of q's shape; with return_lse (out, lse), lse float32 (heads_q,
    total_q) in natural logarithms and without gradient. On a device, lengths are taken as they are.
    """
    cu_seqlens_q = _int32("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is not None:
        cu_seqlens_k = _int32("cu_seqlens_k", cu_seqlens_k)
    _same_device(q.device, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_k is not None:
        _same_device(q.device, cu_seqlens_k=cu_seqlens_k)
    if q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.bfloat16) if x.is_floating_point() else x for x in (q, k, v))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != torch.bfloat16:  # the library has no names for all of torch's
            raise invalid(f"{name}.dtype", x.dtype, "torch.bfloat16, or a float under autocast")
    if _checked(plan) is not None and plan.token is None:
        raise invalid("plan", "a plan of numpy lengths", "one that make_plan made of tensors")
    options = _options(causal, window_size, softmax_scale, recipe)
    out, lse, _ = torch.ops.mxattn.forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None if plan is None else plan.token,
        options["softmax_scale"], options["causal"], *options["window"], recipe,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def attn(q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), recipe="fp8",
         return_lse=False):  # fmt: skip
    """mxattn.attn for torch, with gradients.

    q: (batch, tokens_q, heads_q, head_dim); k, v: (batch, tokens_k, heads_k, head_dim); lse (batch,
    heads_q, tokens_q). All else as attn_varlen.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise invalid(name, type(x).__name__, "a torch tensor, as q")
        if x.ndim != 4 or x.shape[0] != q.shape[0]:
            raise invalid(f"{name}.shape", tuple(x.shape), "(batch, tokens, heads, head_dim) as q")
    batch, tokens, heads, _ = q.shape
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out, lse = attn_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts * tokens, starts * k.shape[1],
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, recipe=recipe,
        return_lse=True,
    )  # fmt: skip
    out = out.unflatten(0, (batch, tokens))
    return (out, lse.unflatten(1, (batch, tokens)).transpose(0, 1)) if return_lse else out


def make_plan(cu_seqlens_q, cu_seqlens_k, q_shape, k_shape, options) -> Plan:
    """The plan of mxattn.make_plan where the lengths lie."""
    device = cu_seqlens_q.device
    cu_q = _int32("cu_seqlens_q", cu_seqlens_q)
    cu_k = None if cu_seqlens_k is None else _int32("cu_seqlens_k", cu_seqlens_k)
    ends = {"q": cu_q, "k": cu_q if cu_k is None else cu_k}
    shapes = []
    for (name, end), shape in zip(ends.items(), (q_shape, k_shape), strict=True):
        if shape[0] is None and device.type != "cpu":
            raise invalid(f"total_{name}", None, f"the rows of {name}: the lengths lie on a device")
        if end.shape[0] < 2:
            raise invalid(f"cu_seqlens_{name}.shape", tuple(end.shape), "(documents + 1,)")
        if shape[0] is None and end[-1] == INT32_MAX:
            raise invalid(f"cu_seqlens_{name}[-1]", "2^31 - 1 or more", "fewer tokens")
        shapes.append((int(end[-1]) if shape[0] is None else shape[0], *shape[1:]))
    problem = capi.cached_problem(
        *shapes, cu_q.shape[0] - 1, device=_device_index(device), **options
    )
    if device.type == "cpu":
        plan = problem.make_plan(cu_q, cu_k)
    else:
        memory = torch.empty(problem.plan_bytes, dtype=torch.uint8, device=device)
        workspace, stream = _workspace(problem, device), _stream(device)
        plan = problem.make_device_plan(cu_q, cu_k, memory, workspace, stream)
        plan.memory, plan.stream = memory, stream
    # What the operators take: a tensor, as graphs are specialised on the values of numbers.
    plan.token = torch.tensor(plan.key, dtype=torch.int64, device="cpu")
    return plan


# ---- helpers -----------------------------------------------------------------------------------


def tensor_on(array, device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def cu_seqlens_from_lengths(lengths: torch.Tensor) -> torch.Tensor:
    """(documents,) -> (documents + 1,) int32 offsets; values are looked at on the CPU only."""
    if lengths.ndim != 1 or lengths.numel() == 0 or lengths.dtype not in _INTEGERS:
        found = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        raise invalid("lengths", found, "integers (documents,)")
    lengths = lengths.long()
    ends = lengths.clamp(max=INT32_MAX + 1).cumsum(0)
    if lengths.device.type == "cpu":
        if lengths.min() < 0:
            raise invalid(f"lengths[{int(lengths.argmin())}]", int(lengths.min()), "at least 0")
        if ends[-1] > INT32_MAX:
            raise invalid("lengths", f"{int(ends[-1])} or more in all", "less than 2^31 tokens")
    return torch.nn.functional.pad(ends.clamp(max=INT32_MAX).to(torch.int32), (1, 0))


def merge_lse(out_a, lse_a, out_b, lse_b):
    """mxattn.merge_lse for torch; out of the dtype of out_a.

    Raises Unsupported where out asks for a gradient and lse, as those of attn_varlen, has none: the
    sum of the gradients of the parts would not be that of the whole (backward_ with merged_lse).
    """
    _same_device(out_a.device, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    for name, x, lse in (("out_a", out_a, lse_a), ("out_b", out_b, lse_b)):
        if x.requires_grad and not lse.requires_grad and torch.is_grad_enabled():
            raise unsupported(f"{name}.requires_grad", True,
                              "False where lse has no gradient; see backward_")  # fmt: skip
    for name, x, like in (("out_b", out_b, out_a), ("lse_b", lse_b, lse_a)):
        if x.shape != like.shape:
            raise invalid(f"{name}.shape", tuple(x.shape), str(tuple(like.shape)))
    if out_a.ndim != 3 or lse_a.shape != (out_a.shape[1], out_a.shape[0]):
        expected = "(heads, tokens) of out (tokens, heads, dim)"
        raise invalid("lse_a.shape", tuple(lse_a.shape), expected)
    top = torch.maximum(lse_a, lse_b).float()
    top = torch.where(top == -torch.inf, 0, top)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = a + b
    lse = torch.log(total) + top
    share = torch.where(total == 0, 1, total)
    out = out_a.float() * (a / share).T[..., None] + out_b.float() * (b / share).T[..., None]
    return out.to(out_a.dtype), lse


def merged_sums(reference, merged_lse):
    """Row sums over all keys, relative to `reference` (see frontend)."""
    _same_device(reference.device, merged_lse=merged_lse)
    exponent = merged_lse.double() * LOG2_E - reference
    return torch.exp2(exponent.clamp(max=LARGEST_EXPONENT)).float()
