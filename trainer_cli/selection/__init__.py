"""Which checkpoints a command names, and what a checkpoint says about itself.

A pattern is a path, a glob, a run, or `RUN@latest`, `RUN@best`, `RUN@step500`; a path may be the URL of an object
store. `select` returns the valid checkpoints that patterns name, `select_one` the one with which a run begins, and
`select_all` every folder, valid or not, for the commands that remove or list. `StoredCheckpoint` is a checkpoint at a
path: its manifest, its config, and the run that saved it.

It promises:
- Every pattern is expanded before any work is done. One that matches nothing is an error that lists what is there.
- A checkpoint that is named twice, also by another path, counts once.
- A damaged or partial checkpoint is never selected in silence: it is reported, and the next older valid one is used.
- A checkpoint that is held (`Holds`) is not removed by the run that saved it.

It reads only, never loads tensors, and does not import torch. A step that only a replay can compute is named here
(`named_steps`), and an add-on computes it (`provide_steps`).

Begin with `patterns.select`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
