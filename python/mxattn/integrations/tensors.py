"""What the integrations share: checks of arguments and of dtypes."""

from __future__ import annotations

import torch

from mxattn import capi
from mxattn.capi import invalid, unsupported

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def checked_recipe(recipe: str) -> str:
    """recipe, where there is one of that name: later, the error would come from inside a model."""
    if recipe not in list(capi.recipes()):
        raise invalid("recipe", repr(recipe), f"one of {', '.join(capi.recipes())}")
    return recipe


def rounded(query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands in BF16: what a recipe quantises, whatever precision the host computes in."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in _DTYPES:
            raise invalid(f"{name}.dtype", x.dtype, "bfloat16, float16 or float32")
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def as_wide_as(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Values with channels of zeros up to the head dimension of the queries; x if it is as wide.

    Queries and keys may be wider than values (multi-head latent attention); the zeros change no
    other channel, and the caller cuts them off the output.
    """
    missing = head_dim - x.shape[-1]
    if missing < 0:
        raise unsupported("value.shape[-1]", x.shape[-1], f"at most {head_dim}, that of the query")
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
