"""Save and load model, optimizer and schedule in a loop of one's own, without a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_cli.catalog import ForeignKind, checkpoint_at, path_to_save
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.errors import MissingStateError, UnfitStateError
from trainer_cli.layout import step_within
from trainer_cli.loads import OTHER_MODEL, VERSIONS, WEIGHTS, WHOLE, LoadOptions, LoadReport, list_by_owner
from trainer_cli.manifest import DamagedCheckpoint, UnrecoverableCheckpoint
from trainer_cli.parallel import ALONE
from trainer_cli.parts import READ_FOREIGN
from trainer_cli.state import Fitting, capture_model, capture_optimizer, find_versions, fit_model, fit_optimizer

_MOVED = ("lr", "momentum", "betas")
"""Settings that schedules of torch move: those of a checkpoint differ from the configured ones for this reason."""
_RESERVED_KEYS = ("model", VERSIONS, "optimizer", "lr_scheduler", "epoch")


def save_checkpoint(
    path: str | PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> None:
    """Save a training as the checkpoint at `path`, durably: a folder, or a URL of an object store. A checkpoint that is
    there is replaced, and stays until the new one is committed; in a store it is refused.

    Args:
        path: `step100` and the like are found by `latest_checkpoint`. `{epoch}`, `{rank}`, `{local_rank}` and
            `{node_rank}` are filled in; two ranks that would save one checkpoint are refused.
        epoch: returned by `load_checkpoint`.
        lr_scheduler: any object with `state_dict` and `load_state_dict`.
        kwargs: more to save: numbers, strings, tensors, and containers of them.

    Raises:
        SaveError: nothing was saved; what was there before still is.
        NotDurableError: it is on this machine, but the store has not taken it.
        UserError: something cannot be saved; it is named.
    """
    path = path_to_save(path, {"epoch": epoch})
    state: dict[str, Any] = {
        "model": capture_model(model),
        VERSIONS: find_versions(model),
        "optimizer": capture_optimizer(model, optimizer),
        "epoch": epoch,
        **kwargs,
    }
    if lr_scheduler is not None:
        state["lr_scheduler"] = lr_scheduler.state_dict()
    metadata = CheckpointMetadata(step=step_within(path.name) or 0, epoch=epoch)
    # Frozen parameters are not examined: one may hold infinity on purpose, as a mask does.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make_sync_checkpointer(group=ALONE).save(state, path, metadata=metadata, trained=trained)


def load_checkpoint(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    finetune: bool = False,
    strict: bool = True,
    ignore_keys: Sequence[str] = (),
    key_mapping: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Load what `save_checkpoint` saved; its epoch, and what else is in the checkpoint by name.

    Args:
        path: as in `Checkpointer.load`: local or a URL, also of an archive; `{rank}` is that of this process.
        finetune: load the model alone, also from a checkpoint of another program; the epoch is 0 then.
        strict: refuse parameters that only the model or only the checkpoint has.
        ignore_keys, key_mapping: as in LoadOptions: what keeps the model's own values, and other names.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it lacks a part; the part is named.
        UserError: with a table of all that does not fit. In both cases nothing was changed, and the error is a
            ValueError too, or, if there is no checkpoint, a FileNotFoundError.
    """
    try:
        path = checkpoint_at(path)
        if ForeignKind.of(path) is not None:
            if not finetune:
                message = f"{path} is of another program, so only its weights can be loaded"
                raise UnfitStateError(message, cure="Add finetune=True.")
            state: Mapping[str, Any] = _read_foreign(path)
        else:
            state = make_sync_checkpointer().read(path)
    except DamagedCheckpoint as error:
        raise UnrecoverableCheckpoint(error.what, where=error.where, cure=error.cure) from error
    states = (WEIGHTS if finetune else WHOLE).states
    options = LoadOptions(states=states, strict=strict, ignore_keys=ignore_keys, key_mapping=key_mapping or {})
    required = ["model"]
    if not finetune:
        stateful = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
        required += ["epoch", *(name for name, value in stateful.items() if value is not None)]
    lacking = [name for name in required if name not in state]
    if lacking:
        raise MissingStateError(
            f"the checkpoint has no {' and no '.join(lacking)}",
            where=str(path),
            cure=None if finetune else "To load the model alone, add finetune=True.",
        )
    versions = state.get(VERSIONS, None if finetune else find_versions(model))
    fitting, report = fit_model(
        model, state["model"], options, versions=versions, cast=finetune, reshape_buffers=not finetune
    )
    fittings: dict[str, Fitting] = {"model": fitting}
    if not finetune and optimizer is not None:
        fittings["optimizer"] = fit_optimizer(
            model, optimizer, state["optimizer"], options, moved=() if lr_scheduler is None else _MOVED
        )
    if not finetune and lr_scheduler is not None:
        fittings["lr_scheduler"] = _fit_scheduler(lr_scheduler, state["lr_scheduler"])
    # All parts are compared before one is loaded, so that a refusal leaves everything as it was.
    if faults := {owner: compared.faults for owner, compared in fittings.items() if compared.faults}:
        text = list_by_owner(f"{path} does not fit", faults)
        cure = _advice(report) if fitting.faults else "To load the model alone, add finetune=True."
        raise UnfitStateError(f"{text}\n", cure=f"Nothing was loaded. {cure}")
    # The schedule first: its own code may still refuse, and then nothing else was changed.
    for owner in ("lr_scheduler", "model", "optimizer"):
        if owner in fittings:
            fittings[owner].load()
    extra = {name: value for name, value in state.items() if name not in _RESERVED_KEYS}
    return (0 if finetune else int(state["epoch"])), extra


def _read_foreign(path: Path) -> dict[str, Any]:
    """The weights of a checkpoint of another program, as a state."""
    foreign = READ_FOREIGN.need(str(path))(path)
    return {"model": foreign.model, VERSIONS: foreign.versions}


def _advice(report: LoadReport) -> str:
    """What to do about weights that do not fit, by arguments of `load_checkpoint`."""
    if report.reshaped:
        more = ", strict=False" if report.needs_not_strict else ""
        return f"To keep the model's own values of these layers, add ignore_keys={report.globs_of_reshaped}{more}."
    if (mapping := report.prefix_mapping) is not None:
        return f"The names differ by a prefix: add key_mapping={mapping}."
    return f"{OTHER_MODEL} strict=False loads what both have." if report.one_sided else OTHER_MODEL


def _fit_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> Fitting:
    """Compare the keys of a saved state with those of the schedule: torch would load any other state silently."""
    live = scheduler.state_dict()
    faults = [f"{key}: missing in the checkpoint" for key in live if key not in saved]
    faults += [f"{key}: not in this schedule" for key in saved if key not in live]
    return Fitting(faults, lambda: scheduler.load_state_dict(saved))
