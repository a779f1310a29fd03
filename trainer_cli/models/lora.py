"""LoRA: train small low-rank matrices beside frozen linear layers, by the `peft` package."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from trainer_cli.core.patterns import matches
from trainer_cli.errors import ConfigError, UserError

SCALING = "lora_scaling"
"""Buffer of an adapted layer: the factor of its product, and 1 if the layer's weight is transposed, else 0."""


def lora(
    model: nn.Module,
    targets: Sequence[str],
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    rslora: bool = False,
    train: Sequence[str] = (),
) -> nn.Module:
    """The same model with low-rank adapters (Hu et al., 2021, arXiv:2106.09685) in its linear layers. Everything else
    is frozen. `train ckpt export --merge-lora` writes the weights of the model without adapters.

    Args:
        model: any module; its own weights are loaded before, or by `ckpt=` with `load.key_mapping`.
        targets: globs of the names of linear layers (or transformers' Conv1D), or `re:` and a regular expression.
        r, alpha: the rank, and the factor: the product of both matrices is multiplied by alpha / r.
        dropout: of the adapters' inputs.
        rslora: multiply by alpha / sqrt(r) (Kalajdzievski, 2023, arXiv:2312.03732).
        train: patterns of the names of further parameters that are trained, such as a new head's.

    Raises:
        ConfigError: a pattern matches nothing, or a layer that is not linear.
        UserError: `peft` is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise UserError("LoRA needs the package peft", cure="pip install 'trainer-cli[lora]'") from None
    patterns = [targets] if isinstance(targets, str) else list(targets)
    named = {name: module for name, module in model.named_modules() if name}
    chosen = {name: one for name, one in named.items() if any(matches(name, pattern) for pattern in patterns)}
    linear = {name: one for name, one in chosen.items() if isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D"}
    if not linear:
        could = [name for name, one in named.items() if isinstance(one, nn.Linear)]
        raise ConfigError(f"no linear layer matches {patterns}", location="targets", hint=f"There are: {could[:20]}.")
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        use_rslora=rslora,
        target_modules="|".join(re.escape(name) for name in linear),
        fan_in_fan_out=all(type(one).__name__ == "Conv1D" for one in linear.values()),
    )
    with warnings.catch_warnings():
        # peft corrects fan_in_fan_out of each layer, and says so.
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, model)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            facts = [float(module.scaling["default"]), float(module.fan_in_fan_out)]
            module.register_buffer(SCALING, torch.tensor(facts, dtype=torch.float32))
    for pattern in [train] if isinstance(train, str) else train:
        found = [one for name, one in model.named_parameters() if matches(name, pattern)]
        if not found:
            raise ConfigError(f"no parameter matches '{pattern}'", location="train")
        for parameter in found:
            parameter.requires_grad_(True)
    return model
