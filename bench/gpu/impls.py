"""Names of implementations, and how each makes its case.

Imports happen late, in the process that runs the implementation.
"""

from __future__ import annotations

RECIPES = ("fp8",)
BF16_PEERS = ("cudnn_bf16", "flash_bf16", "varlen_attn", "flash_attn_3", "flash_attn_4")
FP8_CASTS, FP8_BARE = "cudnn_fp8_casts", "cudnn_fp8"
PEERS = (*BF16_PEERS, FP8_CASTS, FP8_BARE)
ALL = (*RECIPES, *PEERS)

# These compile for each kind of workload, which takes longer than measuring it.
COMPILING = ("flash_attn_4",)

# Packages whose versions the report names.
PACKAGES = {
    "flash_attn_3": ("flash-attn3-jax", "jax"),
    "flash_attn_4": ("flash-attn-4", "nvidia-cutlass-dsl"),
    FP8_CASTS: ("nvidia-cudnn-frontend",),
    FP8_BARE: ("nvidia-cudnn-frontend",),
}


def versions(impl: str) -> dict[str, str]:
    import importlib.metadata

    import torch

    found = {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
    for package in PACKAGES.get(impl, ()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    if impl in RECIPES:
        import mxattn_capi

        found["mxattn"] = mxattn_capi.lib.mxattn_version().decode()
    return found


def builder(impl: str):
    """A function (workload, inputs) -> Case."""
    if impl in ("cudnn_bf16", "flash_bf16"):
        from torch.nn.attention import SDPBackend
        from torch_cases import sdpa

        backends = {
            "cudnn_bf16": SDPBackend.CUDNN_ATTENTION,
            "flash_bf16": SDPBackend.FLASH_ATTENTION,
        }
        return sdpa(backends[impl])
    if impl == "varlen_attn":
        from torch_cases import varlen

        return varlen
    if impl == "flash_attn_4":
        import flash_attn.cute  # noqa: F401  (so that a missing package shows at once)
        from torch_cases import flash4

        return flash4
    if impl == "flash_attn_3":
        from flash3_case import Flash3Case

        return Flash3Case
    if impl in (FP8_BARE, FP8_CASTS):
        from cudnn_case import CudnnCase

        return lambda w, x: CudnnCase(impl == FP8_CASTS, w, x)
    from mxattn_case import MxattnCase

    return lambda w, x: MxattnCase(impl, w, x)
