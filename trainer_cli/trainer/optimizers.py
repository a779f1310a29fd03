"""Make optimizers: parameter groups by globs of names, the fused kernel where possible, several by name.

Some of an optimizer's parameter groups, for a schedule of these alone.

Whether an optimizer can use its fused kernel, which is then the default.

Its results differ in the last bits from those of a step of many kernels. So the choice follows from the config, the
model and the type of the device alone, and a resume makes the same.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from trainer_cli.core.patterns import did_you_mean, matches
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.trainer.setup import check_pattern, made, matches_nothing, typed

TAG = "tag"
"""The key of a parameter group that schedules name it by."""


class TaggedGroups(Optimizer):
    """An optimizer's groups with one of these tags, as long as it has them; all else is the optimizer's own.

    Raises:
        ConfigError: no group has one of the tags.
    """

    _opt_called = True  # What torch's schedulers look for, to warn of a step before the optimizer's first.

    def __init__(self, optimizer: Optimizer, tags: Sequence[str], where: str = "scheduler") -> None:
        # Not Optimizer.__init__, which would make groups of its own.
        self._whole, self._tags = optimizer, list(tags)
        self.defaults = optimizer.defaults
        known = [str(group[TAG]) for group in optimizer.param_groups if TAG in group]
        for tag in tags:
            if tag not in known:
                cure = did_you_mean(tag, known).strip() or "Set `tag` in param_groups."
                raise ConfigError(f"no parameter group has the tag '{tag}'", location=f"{where}.groups", hint=cure)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for group in self._whole.param_groups if group.get(TAG) in self._tags]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._whole.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("step the whole optimizer")


_KERNELS: Mapping[Any, frozenset[str]] = {
    Adam: frozenset({"cpu", "cuda", "mps"}),
    AdamW: frozenset({"cpu", "cuda", "mps"}),
    SGD: frozenset({"cpu", "cuda", "mps"}),
    Adagrad: frozenset({"cpu"}),
}
"""Optimizers with a fused kernel -> its devices."""
_SHARDED = frozenset({Adam, AdamW})
"""Optimizers whose fused kernel takes sharded parameters."""
_WAYS = ("fused", "foreach", "capturable", "differentiable")
"""Settings that choose the implementation of a step; fused is no default if one is set."""


def can_be_fused(
    optimizer: Any, settings: Mapping[str, Any], groups: Iterable[Mapping[str, Any]], model: nn.Module
) -> bool:
    """Whether this optimizer class has a fused kernel for all these parameters, and no implementation is configured.

    Args:
        settings: the arguments it is made with; `groups`: its parameter groups, with their own settings.
    """
    groups = list(groups)
    if optimizer not in _KERNELS or any(given.get(way) is not None for given in (settings, *groups) for way in _WAYS):
        return False
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in model.modules()):
        return False
    sharded = optimizer in _SHARDED
    return all(
        _fits(parameter, _KERNELS[optimizer], sharded=sharded) for group in groups for parameter in group["params"]
    )


def _fits(parameter: Tensor, devices: frozenset[str], *, sharded: bool) -> bool:
    """Whether a parameter is a plain tensor, or a sharded one where that may be, on a device with the kernel."""
    floats = {torch.float32} if parameter.device.type == "mps" else {torch.float32, torch.bfloat16, torch.float64}
    # Not by its class, whose module takes half a second to import.
    plain = type(parameter) in (Tensor, nn.Parameter) or (sharded and type(parameter).__name__ == "DTensor")
    return plain and parameter.device.type in devices and parameter.dtype in floats


log = logging.getLogger(__name__)

ONLY = "optimizer"
"""The name of a single optimizer."""


def optimizer_factory(
    kind: Callable[..., Optimizer],
    *,
    params: str | Sequence[str] | None = None,
    param_groups: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Callable[[nn.Module], Optimizer]:
    """A function `model -> optimizer`, as a config's `optimizer` describes it.

    Args:
        kind: the optimizer's class, which is called with parameter groups and `settings`.
        params: globs of its parameters' names, or regular expressions after `re:`; not given: all trained parameters.
        param_groups: globs of names -> settings of these parameters.
    """

    def make(model: nn.Module) -> Optimizer:
        names = None if params is None else parameters_of(model, {ONLY: params}, where="")[ONLY]
        made: Optimizer = make_optimizer(model, kind, settings, param_groups=param_groups or {}, names=names)
        return made

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
    """An optimizer of the parameters called `names` (not given: all), in groups, fused where it can be.

    Args:
        call: calls `kind` with groups and settings, and reports errors for a group's glob, where one is given.

    Raises:
        ConfigError: a group's setting is not the optimizer's, or refused by it.
    """

    def plainly(groups: Sequence[Any], own: Mapping[str, Any], pattern: str | None) -> Any:
        return kind(groups, **own)

    call = call or plainly
    groups = parameter_groups(model, param_groups, None if names is None else set(names))
    if names is not None:
        param_groups = {
            pattern: own for pattern, own in param_groups.items() if any(matches(name, pattern) for name in names)
        }
    fused = {"fused": True} if can_be_fused(kind, settings, groups, model) else {}
    optimizer = call(groups, {**settings, **fused}, None)
    takes = argument_names(kind)
    refuse_unknown_settings(optimizer, getattr(kind, "__name__", str(kind)), takes, param_groups)
    if str(getattr(kind, "__module__", "")).startswith("torch.optim."):
        # torch checks only the settings of the constructor, so call it once with each group's.
        for pattern, given in param_groups.items():
            own = {key: value for key, value in given.items() if key in takes}
            matrix = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
            call([matrix], {**settings, **own}, pattern)
    return optimizer


def parameters_of(
    model: nn.Module, chosen: Mapping[str, str | Sequence[str] | None], *, where: str = "optimizer"
) -> dict[str, list[str]]:
    """The names of the trained parameters of each optimizer, by globs; the one without globs has the rest.

    Raises:
        ConfigError: a glob matches nothing, or a parameter has two optimizers.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    owner: dict[str, str] = {}
    for optimizer, given in chosen.items():
        at = f"{where}.{optimizer}.params".lstrip(".")
        for pattern in [given] if isinstance(given, str) else given or ():
            check_pattern(pattern, at)
            found = [name for name in trained if matches(name, pattern)]
            if not found:
                raise matches_nothing(pattern, trained, at, "trained parameter")
            for name in found:
                if owner.setdefault(name, optimizer) != optimizer:
                    raise ConfigError(f"{name} is in two optimizers, {owner[name]} and {optimizer}", location=where)
    rest = [name for name, given in chosen.items() if given is None]
    if len(rest) > 1:
        raise ConfigError(f"{where}: {' and '.join(rest)} have no params", location=where, hint="Leave out one alone.")
    if rest:
        owner |= {name: rest[0] for name in trained if name not in owner}
    return {name: [each for each in trained if owner.get(each) == name] for name in chosen}


def made_optimizers(given: Any, model: nn.Module) -> dict[str, Optimizer]:
    """Optimizers by name: of an optimizer, a function `model -> optimizer`, or a mapping of names to either.

    Raises:
        UserError: it is none of these, or a parameter is in two of them, or not the model's; or a mapping leaves a
            trained parameter without an optimizer.
    """
    _refuse_class(given)
    given = made(given, Optimizer, model)
    if given is None:
        return {}
    several = isinstance(given, Mapping)
    optimizers: dict[str, Optimizer] = {}
    owner: dict[torch.Tensor, str] = {}
    own = set(model.parameters())
    for name, one in (given if several else {ONLY: given}).items():
        _refuse_class(one)
        if several and (not str(name).isidentifier() or name == ONLY):
            raise UserError(f"an optimizer is called {name!r}", cure="Give it another name, of letters and digits.")
        one = typed(
            f"optimizer.{name}" if several else ONLY, made(one, Optimizer, model) if several else one, Optimizer
        )
        for group in one.param_groups:
            for parameter in group["params"]:
                if owner.setdefault(parameter, name) != name:
                    raise UserError(
                        f"a parameter is in two optimizers, {owner[parameter]} and {name}",
                        cure="Choose those of each, such as by `params` of optimizer_factory.",
                    )
                if parameter not in own:
                    raise UserError(
                        f"{name}: a parameter of shape {tuple(parameter.shape)} is none of the model's",
                        cure="Give a function `model -> optimizer`; what else is trained belongs into the model.",
                    )
        optimizers[name] = one
    _check_covered(model, owner, several=several)
    return optimizers


def _check_covered(model: nn.Module, owner: Collection[torch.Tensor], *, several: bool) -> None:
    """Refuse trained parameters that none of the optimizers in a mapping has; warn of those that a single one lacks,
    as its caller chose them."""
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in owner]
    if not left:
        return
    if several:
        raise ConfigError(
            f"no optimizer has the parameter {left[0]}",
            location=ONLY,
            hint="Leave out params of one optimizer, which then has the rest; or set requires_grad to False.",
        )
    log.warning(
        "the optimizer lacks %d trained parameter%s, which will not change: %s. `freeze` says so where it is meant",
        len(left),
        "s"[: len(left) != 1],
        ", ".join(left[:3]) + (", ..." if len(left) > 3 else ""),
    )


def _refuse_class(given: Any) -> None:
    if isinstance(given, type) and issubclass(given, Optimizer):
        name = given.__name__
        raise UserError(
            f"optimizer: expected an optimizer or a function `model -> optimizer`, got the class {name}",
            cure=f"Give `lambda model: {name}(model.parameters(), …)`, or optimizer_factory({name}, …).",
        )


def parameter_groups(
    model: nn.Module, patterns: Mapping[str, Any], names: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Parameters in groups of equal settings. Every glob that matches a name counts, later ones win.

    `names` are those of the parameters wanted; not given: all that are trained.

    Raises:
        ConfigError: a glob matches no parameter, or its settings are no mapping.
    """
    for pattern, settings in patterns.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"param_groups: '{pattern}' must hold optimizer settings", location="param_groups")
        check_pattern(pattern, "param_groups")
        if not any(matches(name, pattern) for name, _ in model.named_parameters()):
            raise matches_nothing(pattern, [name for name, _ in model.named_parameters()], "param_groups")
    groups: list[tuple[list[tuple[str, Any]], list[Any]]] = []
    for name, parameter in model.named_parameters():
        settings = {}
        for pattern, own in patterns.items():
            if matches(name, pattern):
                settings.update(own)
        if parameter.requires_grad and (names is None or name in names):
            said = list(settings.items())
            members = next((members for others, members in groups if others == said), None)
            if members is None:
                groups.append((said, members := []))
            members.append(parameter)
    return [{"params": members, **dict(said)} for said, members in groups]


def refuse_unknown_settings(optimizer: Any, name: str, takes: Collection[str], patterns: Mapping[str, Any]) -> None:
    """Refuse settings that the optimizer `name`, whose constructor `takes` these, does not have: torch ignores them.

    Raises:
        ConfigError: naming the setting and the nearest that there is.
    """
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, Mapping):
        return
    known = [key for key in dict.fromkeys((*takes, *map(str, defaults))) if key != "params"]
    for pattern, settings in patterns.items():
        for key in settings:
            if key not in (*known, TAG):
                where = f"param_groups.{pattern}.{key}"
                cure = did_you_mean(key, known).strip() or f"It has: {', '.join(known)}."
                raise ConfigError(f"{name} has no setting '{key}'", location=where, hint=cure)


def argument_names(kind: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a class takes; none if it has no signature."""
    try:
        takes = inspect.signature(kind).parameters.values()
    except (ValueError, TypeError):
        return []
    return [one.name for one in takes if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
