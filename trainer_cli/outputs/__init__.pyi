from trainer_cli.outputs.gathered_metric import GatheredMetric as GatheredMetric
from trainer_cli.outputs.label_count import label_counter as label_counter
from trainer_cli.outputs.metrics import (
    WeightedMeans as WeightedMeans,
    is_known_zero as is_known_zero,
    join_outputs as join_outputs,
    weighted as weighted,
)
from trainer_cli.outputs.model_call import (
    ForwardState as ForwardState,
    explain_error as explain_error,
    make_arguments as make_arguments,
    modes_kept as modes_kept,
    observe as observe,
    observing as observing,
    returned_nothing as returned_nothing,
)
from trainer_cli.outputs.returned import (
    OutputKind as OutputKind,
    is_metric as is_metric,
    read_evaluation as read_evaluation,
    read_outputs as read_outputs,
    returned_weight as returned_weight,
)
from trainer_cli.outputs.token_count import TokenCount as TokenCount
