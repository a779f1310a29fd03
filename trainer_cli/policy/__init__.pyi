from trainer_cli.policy.rules import (
    OF_STOPS as OF_STOPS,
    BestRule as BestRule,
    CheckpointKind as CheckpointKind,
    Decision as Decision,
    RetentionRules as RetentionRules,
    SaveCost as SaveCost,
    Saved as Saved,
    SaveFacts as SaveFacts,
    SaveRules as SaveRules,
)
from trainer_cli.policy.simulation import Simulation as Simulation, Timeline as Timeline
from trainer_cli.policy.stopping import (
    Limits as Limits,
    Occasion as Occasion,
    RecordedEnd as RecordedEnd,
    Stop as Stop,
)
