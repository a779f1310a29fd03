"""Which states of a training a checkpoint holds, and which of them are loaded, under which names.

`STATES` are the states that `load.states` and `checkpoint.leave_out` name, with the keys of a checkpoint that hold
each. `LoadOptions` says what of a checkpoint is taken, `LoadReport` what was: which tensors were missing, unexpected,
ignored or of another shape, and what a user can do about it. `omit_states` takes states away before a save.

Everything is decided from names; nothing here reads a checkpoint or knows torch. A state that a checkpoint lacks is
never loaded as if it were there: `check_load` refuses, and names the states that can be loaded. `model` and `progress`
are in every checkpoint.

Begin with `options.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
