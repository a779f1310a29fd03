"""`python -m trainer_cli VERB …` is `train VERB …`."""

import sys

from trainer_cli.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
