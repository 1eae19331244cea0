"""Mark for tests of optional packages, which are looked up but not imported: each test process collects all tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
