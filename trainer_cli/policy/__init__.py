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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.policy.rules import BestRule as BestRule
    from trainer_cli.policy.rules import CheckpointKind as CheckpointKind
    from trainer_cli.policy.rules import Decision as Decision
    from trainer_cli.policy.rules import RetentionRules as RetentionRules
    from trainer_cli.policy.rules import SaveCost as SaveCost
    from trainer_cli.policy.rules import Saved as Saved
    from trainer_cli.policy.rules import SaveFacts as SaveFacts
    from trainer_cli.policy.rules import SaveRules as SaveRules
    from trainer_cli.policy.simulation import Simulation as Simulation
    from trainer_cli.policy.simulation import Timeline as Timeline
    from trainer_cli.policy.stopping import Limits as Limits
    from trainer_cli.policy.stopping import Occasion as Occasion
    from trainer_cli.policy.stopping import RecordedEnd as RecordedEnd
    from trainer_cli.policy.stopping import Stop as Stop

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "rules": "BestRule CheckpointKind Decision SaveFacts RetentionRules SaveCost Saved SaveRules",
            "simulation": "Simulation Timeline",
            "stopping": "Limits Occasion RecordedEnd Stop",
        },
    )
