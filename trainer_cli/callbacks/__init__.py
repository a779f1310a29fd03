"""The callbacks that ship, about one a module: what is done at the hooks of a training besides the training itself.

Each is a `Callback` of `trainer_cli.trainer` and uses the trainer as a callback of a user would: by its public
attributes and by hooks. State that must survive a resume is in its `state_dict`. None of them imports another program's
library, and none knows of run directories: `trainer_cli.running` builds them from a config, where each is named by its
public name, such as `trainer_cli.EMA`.

The one with the most behind it is `CheckpointerCallback`. It decides by the rules of `trainer_cli.policy` when to save;
`state_saver.py` saves on every rank, at once or in the background; `Retention` removes what the rules do not keep, and
only after the newer checkpoint is committed. With several ranks rank 0 decides and the others follow. A failed save
is reported in the main thread, never swallowed.

Begin with `early_stopping.py`, then `checkpointer.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
