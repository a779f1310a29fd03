"""Makes the package of the campaign importable, and with it the helpers of other folders."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
if SCRIPTS not in sys.path:
    # Last: no name there hides another module.
    sys.path.append(SCRIPTS)
