"""How a model is called with a batch, and what to tell who calls it in another way than it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainer_cli.config.schema import ModelCall
from trainer_cli.errors import UserError

_LONGEST = 8
"""Parts of a batch that are shown."""


def arguments(how: ModelCall, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the named arguments of a model's call.

    Raises:
        UserError: the batch has no such parts.
    """
    if how is ModelCall.batch:
        return [batch], {}
    if how is ModelCall.args and isinstance(batch, list | tuple):
        return list(batch), {}
    if how is ModelCall.kwargs and isinstance(batch, Mapping):
        return [], dict(batch)
    needed = "a list or tuple" if how is ModelCall.args else "a mapping"
    fitting = _fitting(batch)
    raise UserError(
        f"model_call={how} needs {needed} as a batch, and here it is {described(batch)}",
        cure=f"Set model_call={fitting or ModelCall.batch}.",
    )


def explained(error: Exception, model: nn.Module, batch: Any, args: list[Any], named: dict[str, Any]) -> Exception:
    """An error of a model's call, with the batch and the signature where these do not fit each other."""
    try:
        signature = inspect.signature(model.forward)
    except (ValueError, TypeError):
        return error
    fitting = _fitting(batch)
    shown = f"  batch:   {described(batch)}\n  forward: {_takes(signature)}\n"
    if _binds(signature, args, named):
        if fitting is not None and len(args) == 1 and args[0] is batch:
            error.add_note(
                f"The model was called with the whole batch:\n{shown}"
                f"If forward takes its parts, set model_call={fitting}; forward returns the loss."
            )
        elif any(map(_is_transposed, (*args, *named.values()))):
            error.add_note(
                f"The lists of the samples were put together element by element:\n{shown}"
                "Give tensors in the samples, or a data.collate_fn."
            )
        return error
    cure = f"Give the model a forward that takes what is in the batch. {_RETURNS}"
    if fitting is not None and _binds(signature, *arguments(fitting, batch)):
        cure = f"Set model_call={fitting}. {_RETURNS}"
    kind = type(model).__name__
    return UserError(f"{kind}.forward cannot be called with a batch: {_reason(error, kind)}\n{shown}", cure=cure)


_RETURNS = "It returns a loss, (loss, outputs), or a mapping with 'loss'."


def described(batch: Any) -> str:
    """The structure of a batch: containers, types and shapes."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}[{', '.join(map(str, batch.shape))}]"
    if isinstance(batch, Mapping):
        parts = [f"{key}: {described(value)}" for key, value in list(batch.items())[:_LONGEST]]
        return "{" + ", ".join([*parts, *(["…"] if len(batch) > _LONGEST else [])]) + "}"
    if isinstance(batch, list | tuple):
        parts = [described(value) for value in batch[:_LONGEST]] + (["…"] if len(batch) > _LONGEST else [])
        return f"({', '.join(parts)})" if isinstance(batch, tuple) else f"[{', '.join(parts)}]"
    return type(batch).__name__


def _fitting(batch: Any) -> ModelCall | None:
    """The way to call a model with the parts of a batch; None if it has no parts."""
    if isinstance(batch, Mapping):
        return ModelCall.kwargs
    return ModelCall.args if isinstance(batch, list | tuple) else None


def _is_transposed(part: Any) -> bool:
    """Whether a part of a batch is what the default collate makes of lists: a tensor for each place in them."""
    return isinstance(part, list | tuple) and len(part) > 0 and all(isinstance(one, Tensor) for one in part)


def _binds(signature: inspect.Signature, args: list[Any], named: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **named)
    except TypeError:
        return False
    return True


def _takes(signature: inspect.Signature) -> str:
    """The parameters and their defaults, without annotations."""
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return f"({', '.join(map(str, plain))})"


def _reason(error: Exception, kind: str) -> str:
    return str(error).removeprefix(f"{kind}.forward() ")
