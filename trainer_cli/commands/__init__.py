"""The command `train`: its verbs, one module each, and the parsing of its arguments.

A verb is a module with `EXAMPLES`, `add_arguments(parser)` and `run(args) -> exit code`; the table `VERBS` of
`command_line`, or an add-on's `addon.py`, names it, and it is imported only when it is called. `main` runs one verb.
A mistake of the user, which any code raises as a `TrainError`, becomes one message on stderr and an exit code; any
other error is a fault of this program, and is shown with its traceback.

It promises:
- `train --help`, completion and the help of a verb import neither torch nor Hydra.
- An unknown flag, verb or key is refused with the nearest one that exists.
- Results go to stdout, everything else to stderr. A closed pipe or terminal ends no training.

A verb parses and prints. What it does is done by `running`, `runs` and the add-ons, which never import this package,
but for the verbs that add-ons have themselves: they take the flags that several verbs share from here.

Begin with `command_line.main`, then `fit`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
