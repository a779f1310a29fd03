"""`python scripts/campaign`: see campaign.main."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Before torch is imported, here and in what is started from here: trials share the cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Modules are imported from the package, not from its folder, where their names would hide others.
    sys.path[0] = str(Path(__file__).parents[1])
    from campaign.main import main

    sys.exit(main())
