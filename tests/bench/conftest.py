"""The scripts of the benchmarks import one another by name."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
if str(BENCH) not in sys.path:
    # Last: no name of theirs hides another module.
    sys.path.append(str(BENCH))
