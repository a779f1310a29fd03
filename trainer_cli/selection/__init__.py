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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.selection.holds import Holds as Holds
    from trainer_cli.selection.patterns import (
        NamedFolder as NamedFolder,
        Selection as Selection,
        best_of as best_of,
        ckpt_argument as ckpt_argument,
        has_step as has_step,
        named_path as named_path,
        named_steps as named_steps,
        run_of as run_of,
        select as select,
        select_all as select_all,
        select_one as select_one,
        suggest_nearby as suggest_nearby,
        suggest_selector as suggest_selector,
    )
    from trainer_cli.selection.provide import provide_steps as provide_steps
    from trainer_cli.selection.stored import StoredCheckpoint as StoredCheckpoint, run_holding as run_holding

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "holds": "Holds",
            "patterns": (
                "best_of ckpt_argument has_step NamedFolder named_path named_steps run_of select select_all select_one "
                "Selection suggest_nearby suggest_selector"
            ),
            "provide": "provide_steps",
            "stored": "run_holding StoredCheckpoint",
        },
    )
