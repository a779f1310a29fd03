"""`load_model`: the model of a checkpoint by its config, with its weights, for programs that only use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.catalog import ForeignKind
from trainer_cli.checkpoint import read_evaluated_weights
from trainer_cli.components import needs_data
from trainer_cli.config import from_yaml
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.loads import OTHER_MODEL, WEIGHTS, list_by_owner
from trainer_cli.origin import EvaluatedOrigin
from trainer_cli.running.build import Builder
from trainer_cli.selection import StoredCheckpoint, select_one
from trainer_cli.state import find_versions, fit_model, rng_kept
from trainer_cli.trainer import pick_device

if TYPE_CHECKING:
    from torch import nn


def load_model(
    path: str | PathLike[str],
    *,
    device: str = "cpu",
    average: str | None = None,
    overrides: Sequence[str] = (),
    trust: Sequence[str] = (),
    config_dir: str | PathLike[str] | None = None,
) -> nn.Module:
    """Build the model of a checkpoint from its config, load its weights, and return it in evaluation mode.

    As for `train validate`, its class must be of this package, of the project in the current directory (or that of
    `config_dir`), or of a package in `trust`. A class of the project is refused if its file differs from that of the
    run. The project is put on `sys.path`. The state of the random generators is restored.

    Args:
        path: a checkpoint, a run (its newest checkpoint), or `RUN@best`, `RUN@latest`, `RUN@step500`.
        device: the device of the model: `auto`, or the name of a torch device.
        average: name of a callback, such as `ema`, whose average is loaded; `none`: the trained weights; None: the
            weights that the run's evaluations used.
        overrides: changes of the config, as on the command line: `model.dropout=0.0`.
        trust: further packages whose classes the config may name.
        config_dir: the `configs/` of the project; None: that of the current directory.

    Raises:
        CheckpointError: there is no valid checkpoint, or it holds no config.
        ConfigError: the config names a class that is not trusted, or the model cannot be built.
        UserError: the weights do not fit the model, or `overrides` has `load.average`.
    """
    # This comes first: an unknown device is reported before a checkpoint is read.
    torch_device = pick_device(device)
    if any(override.lstrip("+").startswith("load.average=") for override in overrides):
        raise UserError("load.average is not read by load_model", where="overrides", cure="Give average='none'.")
    checkpoint = select_one(str(path))
    source, _ = StoredCheckpoint(checkpoint).read_config()
    if not source and not any(override.lstrip("+").startswith("experiment=") for override in overrides):
        cure = "Name its experiment: overrides=['experiment=NAME']."
        raise CheckpointError(f"{checkpoint} holds no {CONFIG_FILE}", cure=cure)
    composed = from_yaml(
        source,
        [*overrides, *([f"trust={json.dumps(list(trust))}"] if trust else [])],
        config_dir=None if config_dir is None else Path(config_dir),
        sections=("model",),
    )
    # Building the model draws random numbers.
    with rng_kept(), composed.placing():
        # Data is built only if the model needs it: building a data set may take long, and needs its files.
        with_data = needs_data(composed.config.model)
        composed.check_targets(("model", "data") if with_data else ("model",))
        EvaluatedOrigin(composed, {}).compare(checkpoint)
        builder = Builder(composed.config, composed.trust)
        model = builder.model(builder.data().source if with_data else None)
    weights, _, versions = read_evaluated_weights(checkpoint, average)
    if versions is None and ForeignKind.of(checkpoint) is None:
        # Saved before versions were, by the classes that the config names.
        versions = find_versions(model)
    fitting, _ = fit_model(model, weights, WEIGHTS, versions=versions, cast=True, reshape_buffers=True)
    if fitting.faults:
        table = list_by_owner(f"{checkpoint} does not fit", {"model": fitting.faults})
        raise UserError(f"{table}\n", cure=OTHER_MODEL)
    # Only after all faults are known: a model that is half loaded would pass for a whole one.
    fitting.load()
    return model.to(torch_device).eval()
