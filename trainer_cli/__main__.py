"""The entry point of the command `train`, and of `python -m trainer_cli`."""

import sys

from trainer_cli.run.signals import exit_early

_TRAINING = ("fit", "_job")


def main() -> int:
    """Run the command line and return its exit code.

    Before anything else is imported, signals are made to end a training with 75. A signal that comes while Python
    itself starts, in the first hundredths of a second, still kills the process.
    """
    if sys.argv[1:2] and sys.argv[1] in _TRAINING:
        exit_early()
    from trainer_cli.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
