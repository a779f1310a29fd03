"""Makes the helpers of tests/trainer and tests/checkpoint importable, as `tiny` and `attempts`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("trainer", "checkpoint")]
