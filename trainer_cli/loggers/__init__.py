"""Loggers, which write the records of a training to files, displays and services, and can be rewound to a step.

`Logger` (`base.py`) says in which order its methods are called. `Record` holds all that is logged at one step, in plain
numbers and arrays. A trainer gives each logger every record once, in the order of steps, by a `RecordKeeper`, which
keeps what cannot be written now; a service never ends a training.

- After a resume a file holds exactly the records up to that step and the new ones: `rewind` drops the rest, and a crash
  midway loses nothing. A `Mark` in the checkpoint says how long the file was, so that only the rest is read again.
- What is logged up to a checkpoint is on the disk before that checkpoint is committed.
- `MetricRange` is the smallest, largest and newest value of a validation metric over all records.
- Displays run in threads of their own, and read snapshots (`Now`); they change nothing of a training.

Importing a logger imports neither torch nor the library of a service. This package knows nothing of trainers, and of
run directories only the path that it is given.

Begin with `base.py`, then `text_files.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
