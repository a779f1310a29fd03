"""The campaign of faults, `python scripts/campaign`: its modules import one another as `campaign.NAME`.

Makes the helpers of the tests importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1]
ROOT = SCRIPTS.parent
for _folder in (ROOT / "tests/support", SCRIPTS / "bench"):
    if str(_folder) not in sys.path:
        # Last: no name there hides another module.
        sys.path.append(str(_folder))
