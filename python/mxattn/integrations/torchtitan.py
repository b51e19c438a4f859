"""torchtitan: its inner attention of packed documents in a recipe, without a change to its code.

    --override.imports mxattn.integrations.torchtitan.varlen

for the trainer, on a model of the attention backend "varlen". Another recipe: see `varlen`.
docs/integrations.md says what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import mxattn
from mxattn.capi import invalid, unsupported
from mxattn.integrations.tensors import as_wide_as, checked_recipe, rounded

try:
    import spmd_types
    from torchtitan.config import derive, override
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError("mxattn.integrations.torchtitan needs torchtitan >= 0.3") from error


class MxVarlenAttention(VarlenAttention):
    """VarlenAttention in a recipe; models that look for VarlenAttention find it."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        recipe: str = "fp8"

    def __init__(self, config: Config) -> None:
        # NOTE: VarlenAttention's would activate another flash attention for the whole process.
        Module.__init__(self)
        self.window_size = tuple(config.window_size)
        self.recipe = checked_recipe(config.recipe)

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, out_transform=None,
                enable_gqa=False):  # fmt: skip
        """The output in the shape and dtype of q_BLNH, with the head dimension of v_BLNH.

        q_BLNH: (batch, tokens, heads, head_dim), bfloat16, float16 or float32; k_BLNH, v_BLNH: with
        as many heads or fewer, whatever enable_gqa. attention_masks: the VarlenMetadata of the
        batch, whose documents lie in batch * tokens. The window aligns queries to the last keys.
        Raises Unsupported for an out_transform, whose log-sum-exp would need a gradient, and under
        type checking.
        """
        if not isinstance(attention_masks, VarlenMetadata):
            raise invalid("attention_masks", type(attention_masks).__name__, "VarlenMetadata")
        if out_transform is not None:
            raise unsupported("out_transform", "a function", "None: no gradient of log-sum-exp")
        if spmd_types.is_type_checking():
            raise unsupported("spmd_types.is_type_checking()", True, "False")
        q, k, v = rounded(q_BLNH, k_BLNH, v_BLNH)
        rows = (x.flatten(0, 1) for x in (q, k, as_wide_as(v, q.shape[-1])))
        left, right = self.window_size
        out = mxattn.attn_varlen(
            *rows, attention_masks.cu_seq_q, attention_masks.cu_seq_k,
            softmax_scale=scale, causal=right == 0, window_size=(left, right), recipe=self.recipe,
        )  # fmt: skip
        return out.view(q.shape)[..., : v.shape[-1]].to(q_BLNH.dtype)


@override(target=VarlenAttention.Config, description="Packed attention in a recipe of mxattn.")
def varlen(config: VarlenAttention.Config, *, recipe: str = "fp8") -> MxVarlenAttention.Config:
    """The override for `override.imports`: every VarlenAttention of the model.

    With a recipe: 'mxattn.integrations.torchtitan.varlen={"recipe": "bf16"}', in Python the tuple
    ("mxattn.integrations.torchtitan.varlen", {"recipe": "bf16"}).
    """
    return derive(config, MxVarlenAttention.Config, recipe=checked_recipe(recipe))
