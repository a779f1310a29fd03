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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.state.generators import (
        capture_rng as capture_rng,
        restore_rng as restore_rng,
        rng_kept as rng_kept,
    )
    from trainer_cli.state.load_hooks import make_metadata as make_metadata, make_state_dict as make_state_dict
    from trainer_cli.state.model_state import (
        Fitting as Fitting,
        capture_model as capture_model,
        find_none_buffers as find_none_buffers,
        find_versions as find_versions,
        fit_model as fit_model,
    )
    from trainer_cli.state.names import clean_name as clean_name, name_parameters as name_parameters, unwrap as unwrap
    from trainer_cli.state.optimizer_state import (
        capture_optimizer as capture_optimizer,
        fit_optimizer as fit_optimizer,
        inner_optimizers as inner_optimizers,
    )
    from trainer_cli.state.spectral_norm import find_spectral_vectors as find_spectral_vectors
    from trainer_cli.state.weights import (
        are_finite as are_finite,
        find_evaluated_average as find_evaluated_average,
        select_weights as select_weights,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "generators": "capture_rng restore_rng rng_kept",
            "load_hooks": "make_metadata make_state_dict",
            "model_state": "capture_model find_none_buffers find_versions fit_model Fitting",
            "names": "clean_name name_parameters unwrap",
            "optimizer_state": "capture_optimizer fit_optimizer inner_optimizers",
            "spectral_norm": "find_spectral_vectors",
            "weights": "are_finite find_evaluated_average select_weights",
        },
    )
