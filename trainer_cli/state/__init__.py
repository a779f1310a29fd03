"""What of a model, its optimizers and the random generators is saved, and how it is loaded again.

Capturing copies nothing: the tensors of a captured state are the live ones. Loading has two steps: `fit_model` and
`fit_optimizer` compare a state with its owner, change nothing, and return a `Fitting` with a line for all that does not
fit; its `load` then copies the values in place, as they were saved. Nothing is half loaded: a caller compares all parts
before it loads one. Files and formats are not known here.

- Names are those of the model itself (`clean_name`): what torch.compile and parallel wrappers add is not saved. Tied
  tensors are saved under each of their names, as one memory.
- Modules translate what older versions of them have saved by torch's own hooks; `versions_of` is saved for them.
- State of an optimizer is kept by the names of parameters, so a model whose parameters have another order loads it.
- Generators are restored last (`restore_rng`), because whatever runs later may draw from them.
- `weights_of` gives the weights in a state that was read, or the average of them that a callback kept.

Begin with `model_state.py`, then `optimizer_state.py`.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.state.generators import capture_rng as capture_rng
    from trainer_cli.state.generators import restore_rng as restore_rng
    from trainer_cli.state.generators import rng_faults as rng_faults
    from trainer_cli.state.load_hooks import as_state_dict as as_state_dict
    from trainer_cli.state.load_hooks import metadata_of as metadata_of
    from trainer_cli.state.model_state import Fitting as Fitting
    from trainer_cli.state.model_state import capture_model as capture_model
    from trainer_cli.state.model_state import fit_model as fit_model
    from trainer_cli.state.model_state import none_buffers as none_buffers
    from trainer_cli.state.model_state import versions_of as versions_of
    from trainer_cli.state.names import clean_name as clean_name
    from trainer_cli.state.names import parameter_names as parameter_names
    from trainer_cli.state.names import unwrapped as unwrapped
    from trainer_cli.state.optimizer_state import capture_optimizer as capture_optimizer
    from trainer_cli.state.optimizer_state import fit_optimizer as fit_optimizer
    from trainer_cli.state.optimizer_state import inner_optimizers as inner_optimizers
    from trainer_cli.state.spectral_norm import spectral_vectors as spectral_vectors
    from trainer_cli.state.weights import are_finite as are_finite
    from trainer_cli.state.weights import evaluated_average as evaluated_average
    from trainer_cli.state.weights import weights_of as weights_of

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "generators": "capture_rng restore_rng rng_faults",
            "load_hooks": "as_state_dict metadata_of",
            "model_state": "capture_model fit_model Fitting none_buffers versions_of",
            "names": "clean_name parameter_names unwrapped",
            "optimizer_state": "capture_optimizer fit_optimizer inner_optimizers",
            "spectral_norm": "spectral_vectors",
            "weights": "are_finite evaluated_average weights_of",
        },
    )
