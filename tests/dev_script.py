"""The script ``dev`` as a module, for tests of what it does."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from typing import Any

from tests.conftest import ROOT


def dev_script() -> Any:
    """Load it anew, so that a test may replace names in it."""
    loader = SourceFileLoader("dev_script", str(ROOT / "dev"))
    spec = importlib.util.spec_from_loader("dev_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
