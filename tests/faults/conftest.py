"""Makes the helpers of other folders importable here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
# Of the package `campaign`. Last: no name there hides another module.
sys.path.append(str(Path(__file__).parents[2] / "scripts"))
