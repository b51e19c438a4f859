"""What the replays of faults share (parity/test_field_*.py), which users of attention libraries
reported in public.

Sources, as OWNER/REPOSITORY: FA Dao-AILab/flash-attention, TE NVIDIA/TransformerEngine, CFE
NVIDIA/cudnn-frontend, PT pytorch/pytorch, FI flashinfer-ai/flashinfer, HF huggingface/transformers,
Sage thu-ml/SageAttention; #n is an issue, PR n a pull request. FP16 of a report is BF16 here.
"""

from __future__ import annotations

import numpy as np
from reference import bf16, cosines

OUTPUTS = ("o", "lse", "dq", "dk", "dv")
FOLDED = ["fp8", "mxfp8", "mxfp8_token"]


def normal(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [bf16(rng.standard_normal(shape)) for shape in shapes]


def assert_close_to_exact(got, want, least=0.99):
    found = cosines(got, want)
    assert all(c >= least for c in found), found  # NaN, of zeros, is not


def assert_finite(got, *names):
    for name in names or ("o", "dq", "dk", "dv"):
        assert np.isfinite(got[name].astype(float)).all(), name
