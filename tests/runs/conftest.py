"""Makes the helpers of this folder, of tests/trainer and tests/checkpoint importable, as `faked` and `tiny`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).parent))
# Last: this folder and tests/trainer go first where names are alike.
sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
