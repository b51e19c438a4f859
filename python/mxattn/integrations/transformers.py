"""Hugging Face transformers: attention of registered models, packed or padded, in a recipe.

    import mxattn.integrations.transformers as hooks

    hooks.register("mxattn", recipe="fp8")
    model.set_attn_implementation("mxattn")

Documents are isolated where the model is told of them: by cu_seq_lens_q, by position_ids that
restart, or by a padding mask. docs/integrations.md says what is refused.
"""

from __future__ import annotations

import torch

import mxattn
from mxattn.capi import invalid, unsupported
from mxattn.integrations.tensors import as_wide_as, checked_recipe, rounded

# Arguments with which some models change the scores or want more than the output.
_REFUSED = (
    "block_indices",
    "block_table",
    "cache_seqlens",
    "head_mask",
    "indices",
    "position_bias",
    "s_aux",
    "sinks",
    "softcap",
)

# What transformers composes its masks of, as far as a causal mask, a window and documents say the
# same. A function of another name may mean anything, so it is refused.
_MASKS = {
    "and_masks",
    "bidirectional_mask_function",
    "causal_mask_function",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_bidirectional_overlay",
    "sliding_window_overlay",
}


def register(name: str = "mxattn", *, recipe: str = "fp8") -> str:
    """Registers attention with a recipe under a name that models take; returns the name.

    For `model.set_attn_implementation(name)` and `from_pretrained(..., attn_implementation=name)`.
    Several names may stand for several recipes; registering a name again replaces its recipe.
    Raises InvalidArgument for an unknown recipe or a name that transformers would read as one of
    its own, and ImportError without transformers 5.4.
    """
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("mxattn.integrations.transformers needs transformers >= 5.4") from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 4):
        # Older ones ask for masks with other arguments.
        raise ImportError(f"transformers.__version__ = {transformers.__version__}: expected >= 5.4")
    special = ("eager", "flash", "flex_attention", "paged", "sdpa", "/", "|")
    if not isinstance(name, str) or not name or any(part in name for part in special):
        raise invalid("name", repr(name), f"a name without {', '.join(special)}")
    checked_recipe(recipe)

    def attention(module, query, key, value, attention_mask, **options):
        return forward(module, query, key, value, attention_mask, recipe=recipe, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def forward(module, query, key, value, attention_mask, *, recipe="fp8", dropout=0.0, scaling=None,
            sliding_window=None, is_causal=None, position_ids=None, cu_seq_lens_q=None,
            cu_seq_lens_k=None, output_attentions=False, **options):  # fmt: skip
    """What a model calls: (output, None), output (batch, tokens_q, heads_q, head_dim).

    query: (batch, heads_q, tokens_q, head_dim); key, value: (batch, heads_k, tokens_k, head_dim);
    the output has the dtype of the query. Computes in BF16 and the recipe's formats; float32 and
    float16 are rounded to BF16. attention_mask: what `mask` returned. Queries are aligned to the
    last keys, so a key-value cache needs nothing special. The first of these that is given says
    where documents lie: attention_mask, booleans (batch, tokens_k); cu_seq_lens_q (documents + 1,)
    over batch * tokens; position_ids (batch, tokens), a document wherever they do not count on.
    """
    _refuse(dropout, output_attentions, options)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and getattr(getattr(module, "config", None), "is_causal", True)
    if any(x.ndim != 4 or x.shape[0] != query.shape[0] for x in (query, key, value)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise invalid("query, key, value", shapes, "(batch, heads, tokens, head_dim)")
    dtype, value_dim = query.dtype, value.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in rounded(query, key, value))
    v = as_wide_as(v, q.shape[-1])
    # A window of w tokens counts the query itself; without causality it looks w - 1 to both sides.
    left = right = sliding_window - 1 if sliding_window else -1
    how = {
        "softmax_scale": scaling,
        "causal": is_causal,
        "window_size": (left, 0 if is_causal and sliding_window else right),
        "recipe": recipe,
    }
    if attention_mask is not None:
        if cu_seq_lens_q is not None:
            raise invalid("attention_mask", "a mask with padding", "None beside cu_seq_lens_q")
        out = _unpadded(q, k, v, attention_mask, position_ids, how)
    elif cu_seq_lens_q is not None:
        out = _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, how)
    elif position_ids is not None and 1 < q.shape[1] == k.shape[1]:
        cu_seqlens = _documents(position_ids, q.shape[:2])
        out = _packed(q, k, v, cu_seqlens, None, how)
    else:
        if position_ids is not None and 1 < q.shape[1] < k.shape[1]:
            _refuse_restarts_behind_keys(position_ids)
        out = mxattn.attn(q, k, v, **how)
    return out[..., :value_dim].to(dtype), None


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None,
         attention_mask=None, device=None, use_vmap=False, **options):  # fmt: skip
    """The mask of a model's layers, as transformers asks for it: None, or which keys are there.

    Returns booleans (batch, keys) where there is padding or where a static cache is not full yet.
    Raises Unsupported where the model composes its mask of more than causality, a window and
    documents: `forward` could not tell from what it gets.
    """
    # NOTE: A function cannot be taken apart while a graph is traced. Then only those are refused
    # that transformers itself takes for foreign (use_vmap).
    unknown = {"use_vmap"} if use_vmap else set()
    if not torch.compiler.is_compiling():
        unknown = _parts(mask_function) - _MASKS
    if unknown:
        names = ", ".join(sorted(unknown))
        raise unsupported("mask_function", names, "causality, a window and documents alone")
    filled = kv_length
    if "allow_is_bidirectional_skip" not in options:  # causal: keys end where queries do
        filled = min(kv_length, int(q_offset) + q_length - kv_offset)
    if attention_mask is None:
        if filled == kv_length:
            return None
        return torch.ones((batch_size, filled), dtype=torch.bool, device=device)
    attention_mask = attention_mask[:, kv_offset : kv_offset + filled]
    if attention_mask.shape[1] == kv_length and attention_mask.all():
        return None
    return attention_mask


# ---- arguments ---------------------------------------------------------------------------------


def _refuse(dropout, output_attentions, options) -> None:
    if dropout:
        raise unsupported("dropout", dropout, "0 (attention_dropout of the model's config)")
    if output_attentions:
        raise unsupported("output_attentions", True, "False: probabilities are never stored")
    for name in _REFUSED:
        if options.get(name) is not None:
            raise unsupported(name, "given", "None: models with it cannot use this attention")


def _parts(function) -> set[str]:
    """The names of the functions that a mask function of transformers is composed of."""
    found = {getattr(function, "__qualname__", type(function).__name__).split(".")[0]}
    for cell in getattr(function, "__closure__", None) or ():
        inner = cell.cell_contents
        for part in inner if isinstance(inner, tuple) else (inner,):
            if callable(part):
                found |= _parts(part)
    return found


# ---- documents ---------------------------------------------------------------------------------


def _packed(q, k, v, cu_q, cu_k, how) -> torch.Tensor:
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return mxattn.attn_varlen(*rows, cu_q, cu_k, **how).view(q.shape)


def _once(tensor: torch.Tensor, key: tuple, make, beside: torch.Tensor | None = None):
    """make(), kept with the tensor while that is unchanged: all layers are given the same one.

    Making reads values, also those of `beside`, which waits for a device; this way once a step.
    """
    if any(x is not None and x.is_inference() for x in (tensor, beside)):  # has no version
        return make()
    key = (tensor._version, None if beside is None else beside._version, *key)
    known = getattr(tensor, "_mxattn", None)
    if known is None or known[0] != key or known[1] is not beside:
        with torch.inference_mode(False):  # else training could not use it after an evaluation
            tensor._mxattn = known = (key, beside, make())
    return known[2]


@torch.compiler.disable
def _documents(position_ids: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Offsets (documents + 1,) over batch * tokens; each row begins a document."""
    if tuple(position_ids.shape) not in (tuple(shape), (1, shape[1])):
        raise unsupported("position_ids.shape", tuple(position_ids.shape),
                          f"{tuple(shape)}; for others pass cu_seq_lens_q")  # fmt: skip

    def make():
        positions = position_ids.expand(shape)
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions.diff() != 1
        starts = begins.flatten().nonzero().flatten()
        return torch.nn.functional.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)

    return _once(position_ids, tuple(shape), make)


@torch.compiler.disable
def _unpadded(q, k, v, attention_mask, position_ids, how) -> torch.Tensor:
    """Attention of the tokens that the mask keeps; 0 for queries that it does not."""
    if attention_mask.ndim != 2 or attention_mask.shape[0] != q.shape[0]:
        raise unsupported("attention_mask.shape", tuple(attention_mask.shape),
                          "(batch, tokens) or None; pack documents instead")  # fmt: skip
    # A static cache is longer than its mask.
    k, v = (x[:, : attention_mask.shape[1]] for x in (k, v))
    # The queries are the last keys. Without causality they may be others (cross-attention).
    among_keys = how["causal"] or how["window_size"] != (-1, -1)
    if attention_mask.shape != k.shape[:2] or (among_keys and q.shape[1] > k.shape[1]):
        found, expected = tuple(attention_mask.shape), f"{tuple(k.shape[:2])}, no less than queries"
        raise invalid("attention_mask.shape", found, expected)

    def make():
        keys = attention_mask.bool()
        queries = keys[:, -q.shape[1] :] if among_keys else keys.new_ones(q.shape[:2])
        if position_ids is not None and (among_keys or q.shape[:2] == keys.shape):
            _refuse_restarts(position_ids, keys[:, -q.shape[1] :])
        chosen = []
        for kept in (queries, keys):
            chosen.append(kept.flatten().nonzero().flatten())
            chosen.append(mxattn.cu_seqlens_from_lengths(kept.sum(1)))
        return chosen

    at, cu_q, picked, cu_k = _once(attention_mask, (*q.shape[:2], among_keys), make, position_ids)
    out = mxattn.attn_varlen(q.flatten(0, 1)[at], k.flatten(0, 1)[picked],
                             v.flatten(0, 1)[picked], cu_q, cu_k, **how)  # fmt: skip
    rows = out.new_zeros((q.shape[0] * q.shape[1], *out.shape[1:]))
    return rows.index_copy(0, at, out).view(q.shape)


def _refuse_restarts(position_ids, keys) -> None:
    """Positions that fall among the tokens kept: packed documents, which a mask does not tell."""
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, keys.shape[0]):
        return
    if position_ids.shape[1] != keys.shape[1]:
        return
    position_ids = position_ids.expand(keys.shape)
    kept = position_ids.masked_fill(~keys, torch.iinfo(position_ids.dtype).max)
    falls = (kept.flip(1).cummin(1).values.flip(1) < position_ids) & keys
    if falls.any():
        raise invalid("position_ids", "documents that restart", "no mask with padding beside")


@torch.compiler.disable
def _refuse_restarts_behind_keys(position_ids) -> None:
    """Documents among queries behind earlier keys: whose the earlier ones are is not said."""
    if position_ids.ndim == 2:
        restarts = _once(position_ids, ("behind",), lambda: bool((position_ids.diff() != 1).any()))
        if restarts:
            raise invalid("position_ids", "documents that restart", "one document behind a cache")
