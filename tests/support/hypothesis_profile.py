"""Import this for hypothesis in every Python test: what fails here fails on every machine."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile(
    "mxattn", derandomize=True, deadline=None, max_examples=25, print_blob=True
)
hypothesis.settings.load_profile("mxattn")
