"""The simulators of the workers live with the unit tests; the distribution tests drive the same ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
