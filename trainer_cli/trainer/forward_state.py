"""What a forward may change in a model besides gradients, and how it was before."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from trainer_cli.trainer.torch_compat import local


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
