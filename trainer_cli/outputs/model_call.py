"""Call a model with a batch: its arguments, errors that name a mismatch, and what a forward changes in the model."""

from __future__ import annotations

import copy
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer_cli.batches import describe_batch
from trainer_cli.dtensor import local_of
from trainer_cli.errors import UserError
from trainer_cli.schema import ModelCall
from trainer_cli.state import unwrap


class ForwardState:
    """Copies of a model's buffers and extra states, to undo what a forward changes.

    Args:
        parameters: copy the parameters too, because a forward may change them in place, as that of an embedding with
            `max_norm` does. Copies of trained parameters are on their device, where they take no more memory than the
            gradients will. Copies of frozen ones, which have no gradients and may be large, are on the host.
    """

    def __init__(self, model: nn.Module, *, parameters: bool = False) -> None:
        modules = list(model.modules())
        # The tensors themselves and copies of their values: a forward may replace a buffer or change it in place.
        self._buffers = [(name, module, dict(module._buffers)) for name, module in model.named_modules()]
        self._extra = [(module, copy.deepcopy(module.get_extra_state())) for module in modules if _has_extra(module)]
        # Shared buffers are copied once.
        tensors = {buffer for *_, buffers in self._buffers for buffer in buffers.values() if buffer is not None}
        self._copies = {buffer: _copy_tensor(buffer) for buffer in tensors}
        copied = list(model.named_parameters()) if parameters else []
        self._parameters = [(name, local_of(parameter), _copy_tensor(parameter)) for name, parameter in copied]

    def restore(self) -> list[str]:
        """Restore the model's tensors and their values.

        Returns:
            The names of the persistent buffers, and of the copied parameters, that had other values.
        """
        changed = []
        # The tensors first, then their values: a forward may have put another tensor in the place of a buffer.
        for prefix, module, buffers in self._buffers:
            for name, buffer in buffers.items():
                now = module._buffers[name] if name in module._buffers.keys() else None  # noqa: SIM118
                is_persistent = name not in module._non_persistent_buffers_set
                if is_persistent and not self._is_as_before(now, buffer):
                    changed.append(f"{prefix}.{name}".lstrip("."))
            # Item by item: the buffers of a ScriptModule are not a dict.
            for name in set(module._buffers.keys()) - set(buffers):
                del module._buffers[name]
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        with torch.no_grad():
            for buffer, value in self._copies.items():
                tensor = local_of(buffer)
                # Only what has changed: some buffers cannot be written, such as an expanded one. Sparse ones always.
                if not _same_bits(tensor, value):
                    if tensor.shape != value.shape:
                        tensor.resize_(value.shape)
                    tensor.copy_(value)
            for name, tensor, value in self._parameters:
                if not _same_bits(tensor, value):
                    changed.append(name)
                tensor.copy_(value)
        for module, state in self._extra:
            module.set_extra_state(state)
        return changed

    def _is_as_before(self, now: Tensor | None, before: Tensor | None) -> bool:
        """Whether a buffer has the value that was copied; of a sparse one, whether it is the same tensor."""
        if now is None or before is None or before.layout is not torch.strided:
            return now is before
        return _same_bits(local_of(now), self._copies[before])


def _copy_tensor(tensor: Tensor) -> Tensor:
    """A copy of this rank's part of a tensor: of a frozen parameter on the host, else on its device."""
    # Frozen weights may fill most of the device, which keeps no room for a second copy.
    on_host = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    copied: Tensor = local_of(tensor).detach().to("cpu" if on_host else tensor.device, copy=True)
    return copied


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two dense tensors are equal bit for bit; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype or first.layout is not torch.strided:
        return False
    if not first.is_quantized:
        first, second = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(first, second)


def _has_extra(module: nn.Module) -> bool:
    """Whether the class of a module defines an extra state."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


_RETURNS = "It returns a loss, (loss, outputs), or a mapping with 'loss'."


def make_arguments(how: ModelCall, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Make the positional and the named arguments of a model from a batch.

    Raises:
        UserError: the batch is not of the type that `how` needs.
    """
    if how is ModelCall.batch:
        return [batch], {}
    if how is ModelCall.args and isinstance(batch, list | tuple):
        return list(batch), {}
    if how is ModelCall.kwargs and isinstance(batch, Mapping):
        return [], dict(batch)
    needed = "a list or tuple" if how is ModelCall.args else "a mapping"
    raise UserError(
        f"model_call={how} needs {needed} as a batch, and here it is {describe_batch(batch)}",
        cure=f"Set model_call={_unpacking_call(batch) or ModelCall.batch}.",
    )


def _lacks_forward(model: nn.Module, error: Exception) -> bool:
    """Whether a call of the model ended in the forward of nn.Module, which raises because a class must define one."""
    missing_forward = nn.Module.forward
    if getattr(model.forward, "__func__", None) is missing_forward:
        return True
    # The forward of a base class, such as Lightning's, may call that of nn.Module with its own arguments.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1].f_code is missing_forward.__code__:
        return frames[-1].f_locals["self"] is model
    return isinstance(error, TypeError) and f"{missing_forward.__name__}()" in str(error)


def explain_error(error: Exception, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]) -> Exception:
    """Explain an error of a model's call if the batch does not match the signature of its forward.

    Returns a UserError if there is no forward or the arguments cannot be bound, else the error itself, perhaps with a
    note.
    """
    name = type(model).__name__
    if _lacks_forward(model, error):
        cure = f"Define forward(self, batch), for training and evaluation. {_RETURNS}"
        if hasattr(model, "training_step"):
            cure = f"Let forward(self, batch) compute what training_step computes. {_RETURNS}"
        return UserError(f"{name} has no forward, so it cannot be called with a batch", where="model", cure=cure)
    try:
        signature = inspect.signature(model.forward)
    except (ValueError, TypeError):
        return error
    unpacking = _unpacking_call(batch)
    comparison = f"  batch:   {describe_batch(batch)}\n  forward: {_format_signature(signature)}\n"
    # The arguments fit, so that the error is the model's own: it keeps its type and gets a note.
    if _can_bind(signature, args, kwargs):
        got_whole_batch = len(args) == 1 and args[0] is batch
        if unpacking is not None and got_whole_batch:
            # An error that does not name the batch's type, such as `list`, is of the forward's own code.
            if re.search(rf"\b{type(batch).__name__}\b", str(error)):
                error.add_note(
                    f"The model was called with the whole batch:\n{comparison}"
                    f"If forward takes its parts, set model_call={unpacking}; forward returns the loss."
                )
        elif any(map(_is_transposed, (*args, *kwargs.values()))):
            error.add_note(
                f"The lists of the samples were put together element by element:\n{comparison}"
                "Give tensors in the samples, or a data.collate_fn."
            )
        return error
    cure = f"Give the model a forward that takes what is in the batch. {_RETURNS}"
    if unpacking is not None and _can_bind(signature, *make_arguments(unpacking, batch)):
        cure = f"Set model_call={unpacking}. {_RETURNS}"
    forward = f"{name}.forward"
    reason = str(error).removeprefix(f"{forward}() ")
    return UserError(f"{forward} cannot be called with a batch: {reason}\n{comparison}", cure=cure)


def returned_nothing(model: nn.Module) -> UserError:
    """The error for a model whose forward returns None, with the file and line of that forward."""
    model = unwrap(model)
    code = getattr(type(model).forward, "__code__", None)
    location = ""
    if code is not None:
        file = Path(code.co_filename)
        file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        location = f", {file}:{code.co_firstlineno},"
    return UserError(
        f"the model returned NoneType, expected a loss, (loss, outputs), or a mapping with 'loss': "
        f"{type(model).__name__}.forward{location} returns nothing",
        cure="End it with `return loss`, `return loss, outputs`, or `return {'loss': loss, …}`.",
    )


def _unpacking_call(batch: Any) -> ModelCall | None:
    """The `model_call` that unpacks a batch; None if it is not a container."""
    if isinstance(batch, Mapping):
        return ModelCall.kwargs
    return ModelCall.args if isinstance(batch, list | tuple) else None


def _is_transposed(argument: Any) -> bool:
    """Whether an argument is what the default collate makes of lists: a tensor for each position in the lists."""
    if not isinstance(argument, list | tuple) or not argument:
        return False
    return all(isinstance(element, Tensor) for element in argument)


def _can_bind(signature: inspect.Signature, args: list[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function with this signature can be called with these arguments."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _format_signature(signature: inspect.Signature) -> str:
    """The parameters and their defaults, without annotations."""
    parameters = signature.parameters.values()
    return f"({', '.join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)})"


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the mode, training or evaluation, of each module after the block, which may change it."""
    was_training, modes = model.training, [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        # First by `train`, which a class may override to do more, such as to take merged adapters out of the weights.
        model.train(was_training)
        # Then module by module: some may have been in another mode than the model.
        for module, training in modes:
            module.training = training


Observer = Callable[[str, Tensor], None]

_observers: list[Observer] = []


def observe(name: str, tensor: Tensor) -> Tensor:
    """Pass a tensor inside a model to every active observer, such as a TensorListener. Returns the tensor itself.

    Without observers this costs an empty loop. Inside a compiled model observers are not called.
    """
    for observer in _observers:
        observer(name, tensor)
    return tensor


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call `observer` for each tensor that is observed inside the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        # Not the last one: blocks of several threads or callbacks may end in any order.
        _observers.remove(observer)
