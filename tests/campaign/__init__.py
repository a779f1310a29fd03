"""The campaign of faults, `python tests/campaign`: its modules import one another as `campaign.NAME`.

Makes the helpers of the tests importable.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
for _folder in (
    *(TESTS / name for name in ("integration", "parallel", "runs", "support")),
    ROOT / "scripts/bench",
):
    if str(_folder) not in sys.path:
        # Last: no name there hides another module.
        sys.path.append(str(_folder))
