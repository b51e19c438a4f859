"""Settings of the package's tests."""

import hypothesis_profile

hypothesis_profile.load()
