"""What tests need of packages that may be missing: looked for, not imported, as each of several processes collects
all the tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip where one of the packages is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
