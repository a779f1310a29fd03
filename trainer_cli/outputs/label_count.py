"""How many labels of a batch count in the loss of a model of Hugging Face, which is a mean over them.

It is the `num_items_in_batch` of their Trainer: labels that are padded or masked do not count.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from trainer_cli.state import unwrap

_IGNORED = -100
"""The label that torch's cross entropy, and so every loss of transformers, leaves out by default."""
_MEANS_OVER_LABELS = frozenset({
    "ForCausalLMLoss",
    "ForMaskedLMLoss",
    "ForTokenClassification",
    "ForSequenceClassificationLoss",
    "ForSemanticSegmentationLoss",
})  # fmt: skip
"""The functions of transformers that compute a mean over the labels. Others, such as CTC, average over samples."""
_SHIFTED = "ForCausalLMLoss"
"""The function in which a position predicts the next label, so that the first label of a sample does not count."""


def label_counter(model: nn.Module) -> Callable[[Mapping[str, Any]], Tensor | None] | None:
    """A function that counts the labels in the named arguments of a model; None if its loss is not known.

    The loss of a model whose class defines a forward of its own is not known.
    """
    model = unwrap(model)
    # A model of peft calls the model of transformers inside it.
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    forward = inspect.unwrap(type(model).forward)
    code = getattr(forward, "__code__", None)
    is_of_transformers = forward.__module__.startswith("transformers") and hasattr(model, "config")
    if code is None or not is_of_transformers:
        return None
    # The names in the code of the forward tell how it computes its loss.
    if "loss_function" in code.co_names:
        name = _loss_name(model)
        if name not in _MEANS_OVER_LABELS:
            return None
        shifts = name == _SHIFTED
    elif {"CrossEntropyLoss", "cross_entropy"} & {*code.co_names} or any(
        isinstance(module, nn.CrossEntropyLoss) for module in model.children()
    ):
        name, shifts = "", "shift_labels" in code.co_varnames
    else:
        return None
    config: Any = model.config
    ignored = getattr(config, "semantic_loss_ignore_index", _IGNORED) if "SemanticSeg" in name else _IGNORED

    def count(arguments: Mapping[str, Any]) -> Tensor | None:
        labels, must_shift = arguments.get("labels"), shifts
        # Labels that the caller has shifted already.
        if (shifted_labels := arguments.get("shift_labels")) is not None:
            labels, must_shift = shifted_labels, False
        if not isinstance(labels, Tensor) or labels.is_floating_point() or "num_items_in_batch" in arguments:
            return None
        if must_shift and labels.ndim > 1:
            labels = labels[..., 1:]
        # On the device: the host does not wait for it.
        return (labels != ignored).sum()

    return count


def _loss_name(model: Any) -> str:
    """The name of the function that a model of transformers calls as its `loss_function`; empty if it is unknown."""
    function = getattr(model, "_loss_function", None)
    if function is None:
        functions = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
        # As in transformers, a model of an unknown type has the loss of a causal language model.
        function = functions.get(getattr(model, "loss_type", None)) or functions.get("ForCausalLM")
    return str(getattr(function, "__name__", ""))
