"""Megatron-Core: a core attention for its module specs, in a recipe, on packed sequences or not.

    from mxattn.integrations.megatron import MxDotProductAttention

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = MxDotProductAttention

Another recipe: ModuleSpec(module=MxDotProductAttention, params={"recipe": "bf16"}).
docs/integrations.md says what is refused.
"""

from __future__ import annotations

import mxattn
from mxattn.capi import invalid, unsupported
from mxattn.integrations.tensors import as_wide_as, checked_recipe, rounded

try:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.utils import is_layer_window_attention
except ImportError as error:
    raise ImportError("mxattn.integrations.megatron needs megatron-core") from error

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True,
           AttnMaskType.no_mask: False, AttnMaskType.padding: False}  # fmt: skip
_PADDED = (AttnMaskType.padding, AttnMaskType.padding_causal)
if hasattr(AttnMaskType, "causal_bottom_right"):
    _CAUSAL[AttnMaskType.causal_bottom_right] = True


class MxDotProductAttention(MegatronModule):
    """Stands where DotProductAttention or TEDotProductAttention stands in a layer's spec.

    Takes their arguments and one more, `recipe`. Heads are those of this tensor-parallel rank; the
    module has no parameters and asks for no process group. Raises Unsupported for a configuration
    with attention dropout, context parallelism, a softmax with an offset, or QK clipping.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type="self",
                 attention_dropout=None, softmax_scale=None, k_channels=None, v_channels=None,
                 num_splits=None, cp_comm_type=None, pg_collection=None, *,
                 recipe="fp8"):  # fmt: skip
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise unsupported("attention_dropout", dropout, "0")
        if config.context_parallel_size > 1:
            raise unsupported("config.context_parallel_size", config.context_parallel_size, "1")
        softmax = getattr(config, "softmax_type", "vanilla")
        if softmax != "vanilla":
            raise unsupported("config.softmax_type", softmax, "vanilla")
        for name in ("qk_clip", "log_max_attention_logit"):
            if getattr(config, name, False):
                raise unsupported(f"config.{name}", True, "False: scores are never stored")
        self.recipe = checked_recipe(recipe)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.layer_number = max(1, layer_number)
        # NOTE: apply_query_key_layer_scaling divides scores by the layer's number and multiplies
        # them again, so that FP16 holds them; here they are never in 16 bits.
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, getattr(config, "window_attn_skip_freq", None), layer_number
        )
        self.window_size = tuple(config.window_size) if windowed else (-1, -1)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None,
                attention_bias=None, packed_seq_params=None, num_splits=None):  # fmt: skip
        """Attention in the dtype of query.

        sbhd: query (tokens_q, batch, heads_q, head_dim), key and value (tokens_k, batch, heads_k,
        head_dim), gives (tokens_q, batch, heads_q * head_dim of value). thd, in packed_seq_params:
        (tokens, heads, head_dim), gives (tokens, heads_q * head_dim of value). bfloat16, float16 or
        float32, rounded to BF16. num_splits is taken and not used: it would change no bit.

        Raises Unsupported for a mask tensor, a bias, or a mask type that needs either.
        """
        if attention_bias is not None:
            raise unsupported("attention_bias", "a tensor", "None")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask_type not in _CAUSAL:
            raise unsupported("attn_mask_type", mask_type, ", ".join(x.name for x in _CAUSAL))
        how = {
            "softmax_scale": self.softmax_scale,
            "causal": _CAUSAL[mask_type],
            "window_size": self.window_size,
            "recipe": self.recipe,
        }
        q, k, v = rounded(query, key, value)
        value_dim = v.shape[-1]
        v = as_wide_as(v, q.shape[-1])
        if packed_seq_params is None:
            out = _sbhd(q, k, v, attention_mask, mask_type, how)
        else:
            out = _thd(q, k, v, packed_seq_params, how)
        return out[..., :value_dim].flatten(-2).to(query.dtype)


def _sbhd(q, k, v, attention_mask, mask_type, how):
    if q.ndim != 4:
        raise invalid("query.shape", tuple(q.shape), "(tokens, batch, heads, head_dim)")
    if attention_mask is not None:
        # It may hold more than the type says, as with --reset-attention-mask.
        raise unsupported("attention_mask", "a tensor",
                          "None (--no-create-attention-mask-in-dataloader)")  # fmt: skip
    if mask_type in _PADDED:
        raise unsupported("attn_mask_type", mask_type.name, "causal or no_mask unless packed (thd)")
    if mask_type == AttnMaskType.causal and q.shape[0] != k.shape[0]:
        raise unsupported("key.shape[0]", k.shape[0],
                          f"{q.shape[0]}, as query: causal aligns to the first key")  # fmt: skip
    return mxattn.attn(*(x.transpose(0, 1) for x in (q, k, v)), **how).transpose(0, 1)


def _thd(q, k, v, packed, how):
    if packed.qkv_format != "thd":
        raise unsupported("packed_seq_params.qkv_format", packed.qkv_format, "thd")
    cu_q, cu_k = packed.cu_seqlens_q, packed.cu_seqlens_kv
    padded_q, padded_k = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    if getattr(packed, "cp_group", None) is not None:
        raise unsupported("packed_seq_params.cp_group", "a group", "None")
    if padded_q is not None or padded_k is not None:
        # Behind a sequence's tokens its padding is seen by no query before it, so that it may count
        # as part of the sequence. Without causality it would be seen.
        if not how["causal"]:
            raise unsupported("packed_seq_params.cu_seqlens_q_padded", "a tensor",
                              "None: without causality tokens would see the padding")  # fmt: skip
        cu_q = padded_q if padded_q is not None else cu_q
        cu_k = padded_k if padded_k is not None else cu_k
    return mxattn.attn_varlen(q, k, v, cu_q, cu_k, **how)
