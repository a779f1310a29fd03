"""The campaign starts other savers as the scripts of the benchmarks do, by a module of theirs."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
if str(BENCH) not in sys.path:
    # Last: no name of theirs hides another module.
    sys.path.append(str(BENCH))
