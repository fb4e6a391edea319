"""Lets a test module import the builders beside it, which --import-mode=importlib does not."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from core_plugins import plugins  # noqa: F401 - a fixture
