"""Find the values of a config that are `auto`, a batch size and a learning rate, by short trials before the first step.

`decide` makes the trials with objects of its own, which are dropped before those of the training are built: the
training is, bit for bit, that of a config with the numbers that were found. All ranks get the same values. A run finds
a value once and stores it; a resume takes the stored one. `find_batch_size` and `find_learning_rate` (`find.py`) do the
same for a trainer in a program, and undo their trials.

Begin with `decisions.py`; `find.py` has the trials, `trial_memory.py` the memory that a batch may take.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.addons.auto.decisions import AutoDecision as AutoDecision
    from trainer_cli.addons.auto.decisions import decide as decide
    from trainer_cli.addons.auto.decisions import write_decisions as write_decisions

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "decisions": "AutoDecision decide write_decisions",
        },
    )
