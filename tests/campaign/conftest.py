"""Makes the package of the campaign importable, and with it the helpers of other folders."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    # Last: no name there hides another module.
    sys.path.append(TESTS)
