"""Settings of hypothesis for every Python test of the project."""

from __future__ import annotations

import hypothesis


def load() -> None:
    """The same examples on every run: what fails here fails on every machine."""
    hypothesis.settings.register_profile(
        "mxattn", derandomize=True, deadline=None, max_examples=25, print_blob=True
    )
    hypothesis.settings.load_profile("mxattn")
