"""`python probe.py PLAN`: one process of a check of an exact resume."""

import sys

from trainer_cli.addons.exact.attempts import run_probe

sys.exit(run_probe(sys.argv[1]))
