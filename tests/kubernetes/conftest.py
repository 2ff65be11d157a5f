"""Helpers of tests/observability serve here too: what docs/metrics.md tells, PromQL, programs of Debian."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "observability"))
