"""What of a model, its optimizers and the random generators is saved, and how it is loaded again.

Capturing copies nothing: the tensors of a captured state are the live ones. Loading has two steps: `fit_model` and
`fit_optimizer` compare a state with its owner, change nothing, and return a `Fitting` with a line for all that does not
fit; its `load` then copies the values in place, as they were saved. Nothing is half loaded: a caller compares all parts
before it loads one. Files and formats are not known here.

- Names are those of the model itself (`clean_name`): what torch.compile and parallel wrappers add is not saved. Tied
  tensors are saved under each of their names, as one memory.
- Modules translate what older versions of them have saved by torch's own hooks; `find_versions` is saved for them.
- State of an optimizer is kept by the names of parameters, so a model whose parameters have another order loads it.
- Generators are restored last (`restore_rng`), because code that runs later may draw from them.
- `select_weights` gives the weights in a state that was read, or the average of them that a callback kept.

Begin with `model_state.py`, then `optimizer_state.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
