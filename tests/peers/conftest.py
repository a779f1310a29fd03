"""Makes the ranks of tests/checkpoint importable, as `thread_ranks`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
