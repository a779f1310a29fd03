"""Make optimizers from their settings, with parameter groups chosen by patterns of parameter names, and keep what is
accumulated for the next step of one.

The fused kernel of an optimizer is the default where it can be used. Its results differ in the last bits from those of
the other implementations. So the choice follows from the config, the model and the type of the device alone, and a
resume makes the same choice.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.optim.optimizer_modes import explain_missing_closure, needs_closure
from trainer_cli.patterns import check_pattern, did_you_mean, matches, no_match_error
from trainer_cli.signatures import check_type, make_instance
from trainer_cli.state import inner_optimizers
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

ONLY = "optimizer"
"""Name of the optimizer if there is a single one."""
LR_SCALE = "lr_scale"
"""Setting of `param_groups`: the learning rate in units of the optimizer's."""
TAG = "tag"
"""Key of a parameter group; its value is the name by which schedules choose the group."""

_KERNELS: Mapping[Any, frozenset[str]] = {
    Adam: frozenset({"cpu", "cuda", "mps"}),
    AdamW: frozenset({"cpu", "cuda", "mps"}),
    SGD: frozenset({"cpu", "cuda", "mps"}),
    Adagrad: frozenset({"cpu"}),
}
"""Optimizer class with a fused kernel -> the types of devices it runs on."""
_SHARDED = frozenset({Adam, AdamW})
"""Optimizer classes whose fused kernel accepts sharded parameters."""
_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")
"""Settings that choose the implementation of a step. `fused` is not the default if one of them is set."""


def optimizer_factory(
    kind: Callable[..., Optimizer],
    *,
    params: str | Sequence[str] | None = None,
    param_groups: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Callable[[nn.Module], Optimizer]:
    """A function `model -> optimizer` with the settings of a config's `optimizer`.

    Args:
        kind: class of the optimizer, which is called with parameter groups and `settings`.
        params: globs of parameter names, or regular expressions after `re:`; None: all trained parameters.
        param_groups: pattern of names -> settings of these parameters.
    """

    def make(model: nn.Module) -> Optimizer:
        """Make the optimizer of a model."""
        names = None if params is None else parameters_of(model, {ONLY: params}, where="")[ONLY]
        optimizer: Optimizer = make_optimizer(model, kind, settings, param_groups=param_groups or {}, names=names)
        return optimizer

    return make


def make_optimizer(
    model: nn.Module,
    kind: Callable[..., Any],
    settings: Mapping[str, Any],
    *,
    param_groups: Mapping[str, Any],
    names: Collection[str] | None = None,
    call: Callable[[Sequence[Any], Mapping[str, Any], str | None], Any] | None = None,
) -> Any:
    """Make an optimizer of the parameters called `names` (None: all trained ones), in groups, fused where possible.

    Args:
        call: makes `kind` from groups and settings; None: `kind` is called. Its third argument is the pattern for
            errors to name, or None.

    Raises:
        ConfigError: the optimizer does not have a setting of a group, or refuses its value.
    """
    if call is None:
        call = lambda groups, arguments, pattern: kind(groups, **arguments)  # noqa: E731
    rate, kind_name = settings.get("lr", _default_rate(kind)), getattr(kind, "__name__", str(kind))
    _check_scales(param_groups, kind_name, rate)
    groups = parameter_groups(model, param_groups, None if names is None else set(names))
    groups = [_scale_rate(group, rate) for group in groups]
    if names is not None:
        # Patterns of the parameters of other optimizers may hold settings that this one does not have.
        param_groups = {
            pattern: values for pattern, values in param_groups.items() if any(matches(name, pattern) for name in names)
        }
    fused = {"fused": True} if can_be_fused(kind, settings, groups, model) else {}
    optimizer = call(groups, {**settings, **fused}, None)
    accepted = argument_names(kind)
    _check_settings(optimizer, kind_name, accepted, param_groups)
    if str(getattr(kind, "__module__", "")).startswith("torch.optim."):
        # Torch checks constructor arguments, but not settings of groups: make a small optimizer with those of each.
        for pattern, values in param_groups.items():
            arguments = {key: value for key, value in _scale_rate(values, rate).items() if key in accepted}
            matrix = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
            call([matrix], {**settings, **arguments}, pattern)
    return optimizer


def parameters_of(
    model: nn.Module, chosen: Mapping[str, str | Sequence[str] | None], *, where: str = "optimizer"
) -> dict[str, list[str]]:
    """Optimizer -> the names of its trained parameters.

    Args:
        chosen: optimizer -> patterns of parameter names. One optimizer may have None: it gets all other parameters.
        where: place of the optimizers in the config, for errors.

    Raises:
        ConfigError: a pattern matches nothing, or a parameter has two optimizers.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    owner: dict[str, str] = {}
    for optimizer, patterns in chosen.items():
        location = f"{where}.{optimizer}.params".lstrip(".")
        for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
            check_pattern(pattern, location)
            names = [name for name in trained if matches(name, pattern)]
            if not names:
                raise no_match_error(pattern, trained, location, "trained parameter")
            for name in names:
                if owner.setdefault(name, optimizer) != optimizer:
                    raise ConfigError(f"{name} is in two optimizers, {owner[name]} and {optimizer}", location=where)
    without_patterns = [optimizer for optimizer, patterns in chosen.items() if patterns is None]
    if len(without_patterns) > 1:
        raise ConfigError(
            f"{where}: {' and '.join(without_patterns)} have no params", location=where, hint="Leave out one alone."
        )
    if without_patterns:
        owner |= {name: without_patterns[0] for name in trained if name not in owner}
    return {optimizer: [name for name in trained if owner.get(name) == optimizer] for optimizer in chosen}


def _check_kind(slot: str, value: Any) -> Optimizer:
    """The value, if it is an optimizer; else raise UserError, which names the argument `slot`."""
    cure = "Give an optimizer, or a function such as `lambda model: torch.optim.AdamW(model.parameters(), lr=0.001)`."
    if isinstance(value, list | tuple):
        # What configure_optimizers of Lightning returns.
        cure = "Give several optimizers as a mapping of names to them, and schedules as `schedulers`."
    optimizer: Optimizer = check_type(slot, value, Optimizer, cure)
    return optimizer


def make_optimizers(optimizer: Any, model: nn.Module) -> dict[str, Optimizer]:
    """Make the optimizers of a trainer, by name.

    Args:
        optimizer: an optimizer, a function `model -> optimizer`, or a mapping of names to either.

    Raises:
        UserError: `optimizer` is something else; a parameter is in two optimizers, or not in the model; or a mapping
            leaves a trained parameter without an optimizer.
    """
    _refuse_class(optimizer)
    optimizer = make_instance(optimizer, Optimizer, model)
    if optimizer is None:
        return {}
    is_mapping = isinstance(optimizer, Mapping)
    optimizers: dict[str, Optimizer] = {}
    owner: dict[torch.Tensor, str] = {}
    for name, value in (optimizer if is_mapping else {ONLY: optimizer}).items():
        if is_mapping:
            _refuse_class(value)
            if not str(name).isidentifier() or name == ONLY:
                raise UserError(f"an optimizer is called {name!r}", cure="Give it another name, of letters and digits.")
            optimizers[name] = _check_kind(f"optimizer.{name}", make_instance(value, Optimizer, model))
        else:
            optimizers[name] = _check_kind(ONLY, value)
        for group in optimizers[name].param_groups:
            for parameter in group["params"]:
                if owner.setdefault(parameter, name) != name:
                    raise UserError(
                        f"a parameter is in two optimizers, {owner[parameter]} and {name}",
                        cure="Choose those of each, such as by `params` of optimizer_factory.",
                    )
        _check_members(name, optimizers[name], model)
    _check_covered(model, owner, is_mapping=is_mapping)
    _warn_of_unsaved(optimizers)
    return optimizers


def _check_covered(model: nn.Module, covered: Collection[torch.Tensor], *, is_mapping: bool) -> None:
    """Check that each trained parameter is among the `covered` ones, which have an optimizer.

    If a single optimizer lacks some, that is a warning, because its caller chose its parameters. With a mapping, where
    one is easily forgotten, it is an error.
    """
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in covered
    ]
    if not missing:
        return
    if is_mapping:
        raise ConfigError(
            f"no optimizer has the parameter {missing[0]}",
            location=ONLY,
            hint="Leave out params of one optimizer, which then has the rest; or set requires_grad to False.",
        )
    log.warning(
        "the optimizer lacks %s, which will not change: %s. `freeze` says so where it is meant",
        format_count(len(missing), "trained parameter"),
        ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else ""),
    )


def _warn_of_unsaved(optimizers: Mapping[str, Optimizer]) -> None:
    """Warn of optimizers that step by another one, whose state no `state_dict` contains."""
    for optimizer in optimizers.values():
        kind = type(optimizer)
        for inner in inner_optimizers(optimizer):
            if inner.state is not optimizer.state and kind.state_dict is Optimizer.state_dict:
                log.warning(
                    "%s steps by an optimizer of its own (%s) whose state is not in checkpoints, so a resume is not "
                    "exact. Give both the same `state`, or define state_dict and load_state_dict",
                    kind.__name__,
                    type(inner).__name__,
                )


def _check_members(name: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Raise UserError for a parameter of an optimizer that is not the model's, as in a group that a callback adds:
    no checkpoint would have its values."""
    parameters = set(model.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in parameters:
                raise UserError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} does not belong to the model",
                    cure="Give a function `model -> optimizer`; add other trained parameters to the model.",
                )


def _refuse_class(optimizer: Any) -> None:
    """Raise UserError for a class of optimizers: it is callable, and would be called with the model."""
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        name = optimizer.__name__
        raise UserError(
            f"optimizer: expected an optimizer or a function `model -> optimizer`, got the class {name}",
            cure=f"Give `lambda model: {name}(model.parameters(), …)`, or optimizer_factory({name}, …).",
        )


def parameter_groups(
    model: nn.Module, patterns: Mapping[str, Any], names: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Group the trained parameters by equal settings. Of all patterns that match a name, later ones take precedence.

    Args:
        patterns: pattern of parameter names -> settings.
        names: the parameters to group; None: all trained ones.

    Raises:
        ConfigError: a pattern matches no parameter, or its settings are not a mapping.
    """
    for pattern, settings in patterns.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"param_groups: '{pattern}' must hold optimizer settings", location="param_groups")
        check_pattern(pattern, "param_groups")
        if not any(matches(name, pattern) for name, _ in model.named_parameters()):
            raise no_match_error(pattern, [name for name, _ in model.named_parameters()], "param_groups")
    # A list, not a dict by settings: a setting may be a list, which is not hashable.
    groups: list[tuple[list[tuple[str, Any]], list[Any]]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (names is not None and name not in names):
            continue
        merged: dict[str, Any] = {}
        for pattern, settings in patterns.items():
            if matches(name, pattern):
                merged.update(settings)
        key = list(merged.items())
        members = next((members for group_key, members in groups if group_key == key), None)
        if members is None:
            groups.append((key, members := []))
        members.append(parameter)
    return [{"params": members, **dict(key)} for key, members in groups]


def _check_settings(optimizer: Any, name: str, accepted: Collection[str], patterns: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of a group that the optimizer does not have: torch would ignore it.

    Args:
        name: class of the optimizer.
        accepted: arguments of its constructor.
        patterns: pattern of parameter names -> settings.
    """
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, Mapping):
        return
    keys = [key for key in dict.fromkeys((*accepted, *map(str, defaults))) if key != "params"]
    for pattern, settings in patterns.items():
        for key in settings:
            if key not in (*keys, TAG, LR_SCALE):
                where = f"param_groups.{pattern}.{key}"
                cure = did_you_mean(key, keys).strip() or f"It has: {', '.join(keys)}."
                raise ConfigError(f"{name} has no setting '{key}'", location=where, hint=cure)


def _scale_rate(settings: Mapping[str, Any], rate: Any) -> dict[str, Any]:
    """Settings of a group with `lr` in place of `lr_scale`, which multiplies its own `lr` or else the optimizer's."""
    if LR_SCALE not in settings:
        return dict(settings)
    scaled = settings.get("lr", rate) * settings[LR_SCALE]
    return {key: value for key, value in settings.items() if key != LR_SCALE} | {"lr": scaled}


def _check_scales(patterns: Mapping[str, Any], name: str, rate: Any) -> None:
    """Raise ConfigError for an `lr_scale` that is not a number of at least 0, or that has nothing to multiply."""
    for pattern, settings in patterns.items():
        if not isinstance(settings, Mapping) or LR_SCALE not in settings:
            continue
        scale, where = settings[LR_SCALE], f"param_groups.{pattern}.{LR_SCALE}"
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or scale < 0 or not math.isfinite(scale):
            message = f"{where} is {scale!r}, but it must be a factor of the learning rate, at least 0"
            raise ConfigError(message, location=where)
        if settings.get("lr", rate) is None:
            raise ConfigError(f"{where} is {scale}, but {name} has no lr to multiply", location=where)


def _default_rate(kind: Callable[..., Any]) -> Any:
    """The default of a class's argument `lr`; None if it has none."""
    try:
        parameter = inspect.signature(kind).parameters.get("lr")
    except (ValueError, TypeError):
        return None
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def argument_names(kind: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a class accepts; empty if it has no signature."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (ValueError, TypeError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def can_be_fused(
    optimizer: Any, settings: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], model: nn.Module
) -> bool:
    """Whether an optimizer class has a fused kernel for all these parameters, and no implementation is configured.

    Args:
        settings: arguments of the optimizer.
        groups: its parameter groups, with their settings.
    """
    groups = list(groups)
    if optimizer not in _KERNELS:
        return False
    if any(arguments.get(key) is not None for arguments in (settings, *groups) for key in _IMPLEMENTATIONS):
        return False
    # Torch's kernel of SGD fails at a parameter that gets its first gradient later than others: it has no momentum yet.
    if optimizer is SGD and any(arguments.get("momentum") for arguments in (settings, *groups)):
        return False
    # Fused kernels do not accept the sparse gradients of such embeddings.
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module in model.modules()):
        return False
    return all(_has_kernel(parameter, optimizer) for group in groups for parameter in group["params"])


def _has_kernel(parameter: Tensor, optimizer: Any) -> bool:
    """Whether the fused kernel of an optimizer class accepts a parameter, by its class, device and dtype."""
    floats = {torch.float32} if parameter.device.type == "mps" else {torch.float32, torch.bfloat16, torch.float64}
    # By the name of the class: to import DTensor takes half a second.
    is_sharded = optimizer in _SHARDED and type(parameter).__name__ == "DTensor"
    is_plain = type(parameter) in (Tensor, nn.Parameter)
    return (is_plain or is_sharded) and parameter.device.type in _KERNELS[optimizer] and parameter.dtype in floats


class TaggedGroups(Optimizer):
    """View of the parameter groups of an optimizer that have one of some tags, for a schedule of these groups.

    Raises:
        ConfigError: no group has one of the tags.
    """

    # Torch's schedulers warn if it is missing, as a sign of a schedule that steps before its optimizer.
    _opt_called = True

    def __init__(self, optimizer: Optimizer, tags: Sequence[str], where: str = "scheduler") -> None:
        # Optimizer.__init__ is not called, because it would make new groups.
        self._whole, self._tags = optimizer, list(tags)
        self.defaults = optimizer.defaults
        all_tags = [str(group[TAG]) for group in optimizer.param_groups if TAG in group]
        for tag in tags:
            if tag not in all_tags:
                cure = did_you_mean(tag, all_tags).strip() or "Set `tag` in param_groups."
                raise ConfigError(f"no parameter group has the tag '{tag}'", location=f"{where}.groups", hint=cure)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        # Listed at each access: a resume replaces the optimizer's list.
        return [group for group in self._whole.param_groups if group.get(TAG) in self._tags]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._whole.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("step the whole optimizer")


class OptimizerEntry:
    """An optimizer, and what has been accumulated for its next step."""

    def __init__(self, name: str, optimizer: Optimizer, schedules: Sequence[tuple[Any, Callable[[int], Any]]]) -> None:
        self.name, self.optimizer = name, optimizer
        self.schedules = schedules
        """Each schedule that steps after a step of the run, and a function of the number of steps that steps it."""
        self.has_stepped = False
        """Whether the optimizer has stepped in the present step of the run."""
        self.grad_norm: Tensor | None = None
        self.settings: list[dict[str, Any]] | None = None
        """Copy of the parameter groups as the last step used them: schedules change them afterwards."""
        # Only an overridden one is called: torch's takes 7 us more a step than a loop over the gradients.
        self.overrides_zero_grad = type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(
            optimizer
        )
        self.needs_closure = needs_closure(optimizer)
        self.pending = False
        """Whether gradients have been added since its last step."""
        self.weight: float | Tensor
        """Sum of the weights of the batches of these gradients, in units of the first."""
        self.reset_weight()
        self.list_parameters()

    def reset_weight(self) -> None:
        """Start the sum of weights anew."""
        self.weight = 0
        self._batch: int = -1
        self._batch_weight: float | Tensor = 0

    def count(self, weight: float | Tensor, relative_weight: float | Tensor, batch: int) -> None:
        """Count the weight of a batch: once, however many losses of it are added.

        Args:
            relative_weight: the weight in units of the first.
            batch: number of the batch.

        Raises:
            UserError: a loss of the same batch had another weight.
        """
        # A weight on a device is compared, for which the host waits, only at a further loss of the same batch. After a
        # weight of 0, whose loss is ignored, the further loss has the first one.
        if batch != self._batch or (self._batch_weight is not weight and bool(self._batch_weight == 0)):
            self._batch, self._batch_weight = batch, weight
            self.weight = self.weight + relative_weight
        elif self._batch_weight is not weight and bool(weight != 0) and bool(weight != self._batch_weight):
            raise UserError(
                f"two losses of one batch have the weights {float(self._batch_weight):g} and {float(weight):g}, and an "
                "accumulated gradient has one for a batch",
                cure="Multiply the losses by factors of their own, and give all the same weight.",
            )

    def list_parameters(self) -> None:
        """List the optimizer's parameters. Only their gradients are divided and clipped."""
        groups = self.optimizer.param_groups
        self.group_count = len(groups)
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        # Which settings are tensors: schedules change these in place.
        self._tensor_settings = [
            (number, key) for number, group in enumerate(groups) for key in group if isinstance(group[key], Tensor)
        ]

    def check_parameters(self, model: nn.Module) -> None:
        """Raise UserError for a parameter that is not the model's, as in a group that a callback has added."""
        _check_members(self.name, self.optimizer, model)

    def explain(self, error: Exception) -> Exception:
        """Explain an error of a step, if the optimizer needs its optional `closure`; else return the error itself."""
        return explain_missing_closure(self.optimizer, error)

    def keep_settings(self) -> None:
        """Copy the groups' settings before a step."""
        self.settings = [group.copy() for group in self.optimizer.param_groups]
        # A clone stays on the device, so the host does not wait for it.
        for number, key in self._tensor_settings:
            self.settings[number][key] = self.settings[number][key].detach().clone()
