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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.commands.ckpt import Action as Action
    from trainer_cli.commands.command_line import (
        Parser as Parser,
        add_allow_pickle as add_allow_pickle,
        add_config_arguments as add_config_arguments,
        add_config_dir as add_config_dir,
        add_no_replay as add_no_replay,
        add_overrides as add_overrides,
        main as main,
    )
    from trainer_cli.commands.streams import tolerate_lost_output as tolerate_lost_output
    from trainer_cli.commands.tail import no_run as no_run

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "ckpt": "Action",
            "command_line": (
                "add_allow_pickle add_config_arguments add_config_dir add_no_replay add_overrides main Parser"
            ),
            "streams": "tolerate_lost_output",
            "tail": "no_run",
        },
    )
