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
