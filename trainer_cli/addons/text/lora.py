"""LoRA: train low-rank matrices beside frozen linear layers, with the `peft` package."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.loads import LORA_SCALING
from trainer_cli.patterns import matches


def lora(
    model: nn.Module,
    targets: Sequence[str],
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    rslora: bool = False,
    train: Sequence[str] = (),
) -> nn.Module:
    """Add low-rank adapters (Hu et al., 2021, arXiv:2106.09685) to linear layers of a model, and freeze all else.

    `train ckpt export --merge-lora` writes the merged weights, without adapters. Returns the model.

    Args:
        model: any module. Its weights are loaded before, or by `ckpt=` with `load.key_mapping`.
        targets: globs of the names of linear layers (or transformers' Conv1D), or `re:` and a regular expression.
        r, alpha: rank, and numerator of the scaling: the product of both matrices is multiplied by alpha / r.
        dropout: dropout of the adapters' inputs.
        rslora: multiply by alpha / sqrt(r) (Kalajdzievski, 2023, arXiv:2312.03732).
        train: patterns of the names of other parameters to train, such as those of a new head.

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
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if any(matches(name, pattern) for pattern in patterns)
    }
    if not linear:
        names = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        raise ConfigError(f"no linear layer matches {patterns}", location="targets", hint=f"Available: {names[:20]}.")
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        use_rslora=rslora,
        # peft takes one string as a regular expression for the whole name.
        target_modules="|".join(re.escape(name) for name in linear),
        fan_in_fan_out=all(type(module).__name__ == "Conv1D" for module in linear.values()),
    )
    with warnings.catch_warnings():
        # peft warns when it corrects fan_in_fan_out of a layer.
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, model)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # Saved with the weights, so that an export can merge without the config.
            scaling = [float(module.scaling["default"]), float(module.fan_in_fan_out)]
            module.register_buffer(LORA_SCALING, torch.tensor(scaling, dtype=torch.float32))
    for pattern in [train] if isinstance(train, str) else train:
        parameters = [parameter for name, parameter in model.named_parameters() if matches(name, pattern)]
        if not parameters:
            raise ConfigError(f"no parameter matches '{pattern}'", location="train")
        for parameter in parameters:
            parameter.requires_grad_(True)
    return model
