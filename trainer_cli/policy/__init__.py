"""Decides when to save, which checkpoints may go and when a run ends, and simulates a run by the same decisions.

`SaveRules` and `RetentionRules` are the `checkpoint` section with intervals that know the length of an epoch, `Limits`
the ends of a run. Each is asked with plain facts (`SaveFacts`, the checkpoints that are `Saved`) and answers with a
reason, which is logged and shown to the user; None is no. `Simulation.run` goes through a training from event to event
and asks the same methods, so that a plan cannot differ from the training.

Nothing here saves, removes or stops; no clock, no disk, no torch. Invariants:

- A step is saved once. A step with several reasons is saved for the strongest: regular before ephemeral.
- What `why_keep` names, `why_remove` does not. The newest checkpoint stays, and the one that a resume would choose.
- In doubt a checkpoint stays: what is removed cannot be restored.
- A complete run is finished, even if a stop was requested at the same step.

Begin with `rules.py`; `stopping.py` has the ends of a run, `simulation.py` the walk over events.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
