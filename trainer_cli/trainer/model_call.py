"""How a model is called with a batch, and what to tell who calls it in another way than it takes.

What a forward may change in a model besides gradients, and how it was before.

`observe(name, tensor)`: mark a tensor inside a model, so that callbacks can look at it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer_cli.core.schema import ModelCall
from trainer_cli.errors import UserError
from trainer_cli.parallel.torch_compat import local


class ForwardState:
    """Copies of a model's buffers and extra states.

    Args:
        parameters: copy the parameters, too: a forward may change some in place, as that of an embedding with a largest
            norm does. The copies of trained ones take no more memory than their gradients will; those of others, which
            have none and may be large, are on the host.
    """

    def __init__(self, model: nn.Module, *, parameters: bool = False) -> None:
        modules = list(model.modules())
        # A forward may put other tensors in place of its buffers.
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        self._extra = [(module, copy.deepcopy(module.get_extra_state())) for module in modules if _has_extra(module)]
        self._copies = [(local(buffer), _copied(buffer)) for buffer in model.buffers()]
        if parameters:
            self._copies += [(local(parameter), _copied(parameter)) for parameter in model.parameters()]

    def restore(self) -> None:
        """Give the model the values that it had, in the tensors that it had."""
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, value in self._copies:
                tensor.copy_(value)
        for module, state in self._extra:
            module.set_extra_state(state)


def _copied(tensor: Tensor) -> Tensor:
    on_host = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return local(tensor).detach().to("cpu" if on_host else tensor.device, copy=True)


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


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


Observer = Callable[[str, Tensor], None]

_observers: list[Observer] = []


def observe(name: str, tensor: Tensor) -> Tensor:
    """Show a tensor to every active observer, such as a TensorListener; returns the tensor itself.

    Without observers this costs one test. Inside a compiled model observers are not called.
    """
    for observer in _observers:
        observer(name, tensor)
    return tensor


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call a function for each tensor that is observed inside the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
