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

add_lazy_names(globals())
