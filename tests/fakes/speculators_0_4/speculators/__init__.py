"""FAKE downstream: see tests/fakes/README.md."""

import speculators.models  # noqa: F401
