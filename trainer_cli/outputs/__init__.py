"""What a model is called with, what it returns, and what becomes of it: means, totals and counts.

`make_arguments` makes the arguments of a forward from a batch. What it returns is interpreted in one place,
`returned.py`: `read_outputs` finds the loss, and `OutputKind.of` says of each named output whether it is averaged
(`mean`), summed (`total`: weight, tokens), accumulates itself (`metric`, see `GatheredMetric`), or left to callbacks.

- Means are weighted by the samples of a batch, or by the `weight` that the model returns. A batch of weight 0 adds
  nothing, even if its values are NaN.
- Sums stay on the device (`WeightedMeans`): the host waits only where a mean is read. They are a part of checkpoints,
  and a resume continues from them.
- `ForwardState` and `modes_kept` undo what a forward changes in a model besides its outputs.
- Errors of a call that does not fit the batch name both (`explain_error`).

Begin with `returned.py`, then `metrics.py`.
"""

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
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

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "gathered_metric": "GatheredMetric",
            "label_count": "label_counter",
            "metrics": "is_known_zero join_outputs weighted WeightedMeans",
            "model_call": "explain_error ForwardState make_arguments modes_kept observe observing returned_nothing",
            "returned": "is_metric OutputKind read_evaluation read_outputs returned_weight",
            "token_count": "TokenCount",
        },
    )
