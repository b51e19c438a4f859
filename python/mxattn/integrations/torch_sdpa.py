"""torch's registry of flash attention implementations: SDPA and varlen_attn in a recipe.

    import mxattn.integrations.torch_sdpa as hooks
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    hooks.register("mxattn", recipe="fp8")
    activate_flash_attention_impl("mxattn")
    ...  # scaled_dot_product_attention, torch.nn.attention.varlen.varlen_attn
    restore_flash_attention_impl()

Activating replaces the kernels that torch's dispatcher calls for flash attention, on CUDA devices
and on the CPU. Which calls go to flash attention is torch's choice as before (`sdpa_kernel`); one
that comes here and cannot run raises. Restore after the last backward.
"""

from __future__ import annotations

import functools

import torch

import mxattn
import mxattn.torch as front
from mxattn.capi import unsupported
from mxattn.integrations.tensors import checked_recipe, rounded


def register(name: str = "mxattn", *, recipe: str = "fp8") -> str:
    """Registers a recipe for torch.nn.attention.activate_flash_attention_impl; returns the name.

    Registering activates nothing. Several names may stand for several recipes. Raises
    InvalidArgument for an unknown recipe, Unsupported where torch has no such registry.
    """
    checked_recipe(recipe)
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise unsupported("torch.__version__", torch.__version__,
                          "one with torch.nn.attention.register_flash_attention_impl")  # fmt: skip
    torch.nn.attention.register_flash_attention_impl(name, register_fn=lambda: Activation(recipe))
    return name


class Activation:
    """The kernels in torch's dispatcher, until remove()."""

    def __init__(self, recipe: str):
        kernels = Kernels(recipe)
        shared = {
            "_flash_attention_forward": kernels.forward,
            "_flash_attention_forward_no_dropout_inplace": kernels.forward_inplace,
            "_flash_attention_backward": kernels.backward,
            "_scaled_dot_product_flash_attention": kernels.sdpa,
            "_scaled_dot_product_flash_attention_backward": kernels.sdpa_backward,
        }
        of_cpu = {
            "_scaled_dot_product_flash_attention_for_cpu": kernels.sdpa_cpu,
            "_scaled_dot_product_flash_attention_for_cpu_backward": kernels.sdpa_cpu_backward,
        }
        self._libraries = []
        for key, kernels_of_key in (("CUDA", shared), ("CPU", shared | of_cpu)):
            library = torch.library.Library("aten", "IMPL", key)
            self._libraries.append(library)
            for operator, kernel in kernels_of_key.items():
                if hasattr(torch.ops.aten, operator):
                    library.impl(operator, kernel)

    def remove(self) -> None:
        self._libraries.clear()  # each takes its kernels out of the dispatcher when it goes


class Kernels:
    """What stands in for torch's flash attention; arguments and results are those of the operators.

    Dense operands are (batch, heads, tokens, head_dim) in the operators of SDPA, (batch, tokens,
    heads, head_dim) in the others; packed ones (tokens, heads, head_dim).
    """

    def __init__(self, recipe: str):
        self.recipe = recipe

    # ---- the operators of varlen_attn ----------------------------------------------------------

    def forward(self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
                seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):  # fmt: skip
        _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, seqused_k=seqused_k,
                alibi_slopes=alibi_slopes, block_table=block_table)  # fmt: skip
        how = self._how(scale, is_causal, window_size_left, window_size_right)
        out, lse = _forward(query, key, value, cum_seq_q, cum_seq_k, how)
        return out, lse, *_no_random_state(query)

    def forward_inplace(self, out, *args, **options):
        result, lse, *_ = self.forward(*args, **options)
        out.copy_(result)
        return lse

    def backward(self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
                 max_k, dropout_p, is_causal, rng_state, unused, *, scale=None,
                 window_size_left=None, window_size_right=None):  # fmt: skip
        _refuse(dropout_p=dropout_p)
        how = self._how(scale, is_causal, window_size_left, window_size_right)
        return _backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, how)

    # ---- the operators of scaled_dot_product_attention -----------------------------------------

    def sdpa(self, query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
             scale=None):  # fmt: skip
        _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
        out, lse = _forward(*self._square(query, key, value, is_causal), None, None,
                            self._how(scale, is_causal))  # fmt: skip
        out = _laid_out_as(query, out.transpose(1, 2))
        return out, lse, None, None, query.shape[2], key.shape[2], *_no_random_state(query)

    def sdpa_backward(self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k,
                      max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset, *,
                      scale=None):  # fmt: skip
        _refuse(dropout_p=dropout_p)
        operands = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = _backward(*operands, logsumexp, None, None, self._how(scale, is_causal))
        return tuple(x.transpose(1, 2) for x in gradients)

    def sdpa_cpu(self, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None,
                 scale=None):  # fmt: skip
        _refuse(dropout_p=dropout_p, attn_mask=attn_mask)
        out, lse = _forward(*self._square(query, key, value, is_causal), None, None,
                            self._how(scale, is_causal), lse_order=(0, 2, 1))  # fmt: skip
        return _laid_out_as(query, out.transpose(1, 2)), lse

    def sdpa_cpu_backward(self, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal,
                          *, attn_mask=None, scale=None):  # fmt: skip
        _refuse(attn_mask=attn_mask)
        return self.sdpa_backward(grad_out, query, key, value, out, logsumexp, None, None, 0, 0,
                                  dropout_p, is_causal, None, None, scale=scale)  # fmt: skip

    def _square(self, query, key, value, is_causal):
        """The operands as (batch, tokens, heads, head_dim), if both alignments mean the same."""
        if is_causal and query.shape[2] != key.shape[2]:
            raise unsupported("key.shape[2]", key.shape[2],
                              f"{query.shape[2]}, as query: is_causal aligns to the first key, "
                              "mxattn.attn(causal=True) to the last")  # fmt: skip
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _how(self, scale, is_causal, left=None, right=None) -> dict:
        window = tuple(-1 if side is None else side for side in (left, right))
        return {"softmax_scale": scale, "causal": is_causal, "window": window,
                "recipe": self.recipe}  # fmt: skip


def _refuse(**arguments) -> None:
    for name, value in arguments.items():
        found = "a tensor" if isinstance(value, torch.Tensor) else value
        if found:
            raise unsupported(name, found, "nothing; sdpa_kernel chooses another backend")


def _no_random_state(query):
    """rng_state, an unused tensor, debug_attn_mask: without dropout they say nothing."""
    device = query.device
    return (torch.zeros(2, dtype=torch.uint64, device=device),
            torch.zeros((), dtype=torch.uint64, device=device),
            torch.empty(0, dtype=query.dtype, device=device))  # fmt: skip


def _laid_out_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x with the strides that torch's shape functions promise, those of empty_like(like)."""
    promised = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == promised else torch.empty_like(like).copy_(x)


# ---- calls -------------------------------------------------------------------------------------


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.flatten(0, 1) if x.ndim == 4 else x
    return x if x.stride(-1) == 1 else x.contiguous()


def _starts(query, key, cum_seq_q, cum_seq_k):
    if cum_seq_q is not None:
        return cum_seq_q, cum_seq_k
    starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    return starts * query.shape[1], starts * key.shape[1]


# NOTE: The operators have no output for the state that the forward leaves to the backward, but
# torch hands the log-sum-exp from one to the other, and with it its memory. So the state lies
# behind it: [log-sum-exp | to a multiple of 256 bytes | state | tail]. The tail makes the size odd,
# which that of no copy of a log-sum-exp is, and its length tells the recipe: another may have been
# activated since. Where the state is lost, the forward is repeated, with the same bits. Ring
# attention hands over log-sum-exps of more keys than these: they are told from copies by their bits
# and refused, as the backward could not honour them.


def _behind(lse_numel: int) -> int:
    return -(-4 * lse_numel // 256) * 256


@functools.cache
def _tail(recipe: str) -> int:
    return 1 + 2 * list(mxattn.recipes()).index(recipe)


def _state_of(lse: torch.Tensor, problem, recipe: str) -> torch.Tensor | None:
    memory, behind = lse.untyped_storage(), _behind(lse.numel())
    if lse.storage_offset() or memory.nbytes() != behind + problem.state_bytes + _tail(recipe):
        return None
    block = torch.empty(0, dtype=torch.uint8, device=lse.device)
    return block.set_(memory, 0, (memory.nbytes(),), (1,))[behind : -_tail(recipe)]


def _forward(query, key, value, cum_seq_q, cum_seq_k, how, lse_order=(0, 1, 2)):
    """Output as query, and log-sum-exp: (heads, tokens) if packed, else (batch, heads, tokens)."""
    operands = rounded(query, key, value)
    q, k, v = (_rows(x) for x in operands)
    cu_q, cu_k = _starts(query, key, cum_seq_q, cum_seq_k)
    problem = front.problem_of(q, k, cu_q, **how)
    size = 4 * q.shape[0] * q.shape[1]
    behind = _behind(size // 4)
    tail = _tail(how["recipe"])
    block = torch.empty(behind + problem.state_bytes + tail, dtype=torch.uint8, device=q.device)
    lse = block[:size].view(torch.float32)
    out, packed = torch.empty(q.shape, dtype=q.dtype, device=q.device), lse.view(q.shape[1], -1)
    dense = query.ndim == 4
    if dense:
        packed = torch.empty_like(packed)
    _call(mxattn.forward_, q, k, v, out, packed, block[behind:-tail], cu_q, cu_k, how)
    if not dense:
        return out.to(query.dtype), packed
    batch, tokens, heads, _ = query.shape
    sizes = (batch, heads, tokens)
    lse = lse.view(*(sizes[axis] for axis in lse_order)).permute(lse_order)  # its own inverse
    lse.copy_(packed.view(heads, batch, tokens).transpose(0, 1))
    return out.view(query.shape).to(query.dtype), lse


def _backward(grad_out, query, key, value, out, lse, cum_seq_q, cum_seq_k, how):
    """Gradients of query, key and value, contiguous in the order of their dimensions here."""
    q, k, v = (_rows(x) for x in rounded(query, key, value))
    cu_q, cu_k = _starts(query, key, cum_seq_q, cum_seq_k)
    problem = front.problem_of(q, k, cu_q, **how)
    state = _state_of(lse, problem, how["recipe"])
    if lse.ndim == 3:
        lse = lse.transpose(0, 1).reshape(q.shape[1], -1)
    o, lse = _rows(out.bfloat16()), lse.contiguous()
    if state is None:
        state = torch.empty(problem.state_bytes, dtype=torch.uint8, device=q.device)
        o, own = torch.empty_like(o), torch.empty_like(lse)
        _call(mxattn.forward_, q, k, v, o, own, state, cu_q, cu_k, how)
        if not torch.equal(own.view(torch.int32), lse.view(torch.int32)):
            raise unsupported("logsumexp", "that of other keys or of another recipe",
                              "what the forward returned")  # fmt: skip
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    _call(mxattn.backward_, _rows(grad_out.bfloat16()), q, k, v, o, lse, state, *gradients, cu_q,
          cu_k, how)  # fmt: skip
    return tuple(
        x.view(like.shape).to(like.dtype)
        for x, like in zip(gradients, (query, key, value), strict=True)
    )


def _call(function, *arguments) -> None:
    *arguments, how = arguments
    options = {name: x for name, x in how.items() if name != "window"}
    function(*arguments, window_size=how["window"], **options)
