"""Hooks for libraries that let one exchange their attention; docs/integrations.md shows each.

torch_sdpa: torch's registry of flash attention implementations, for scaled_dot_product_attention
and varlen_attn. transformers: Hugging Face's registries of attention and mask functions.
torchtitan: overrides of its inner attention. megatron: a core attention for its module specs.

Importing this package imports none of them: each module is imported by who names it.
"""
