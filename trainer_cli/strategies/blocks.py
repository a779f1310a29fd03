"""The blocks of a model: modules that FSDP shards, or the backward computes again, as a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_cli.errors import ConfigError


def find_blocks(model: nn.Module, classes: Sequence[str] = (), min_parameters: int | None = None) -> list[nn.Module]:
    """The blocks of a model, inner ones first, without the model itself.

    Args:
        classes: names of their classes; if empty, the modules in each ModuleList, such as the layers of a transformer.
        min_parameters: also modules that have this many parameters besides those of blocks inside them.

    Raises:
        ConfigError: no module is of one of the classes.
    """
    # A dict as an ordered set.
    blocks: dict[nn.Module, None] = {}
    # The parameters of each module that are those of a block: of itself, or of blocks inside it.
    in_blocks: dict[nn.Module, set[nn.Parameter]] = {}
    listed = {child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    class_names: set[str] = set()
    # Reversed, so that the blocks inside a module are known before it.
    for module in reversed(list(model.modules())):
        of_inner_blocks = {parameter for child in module.children() for parameter in in_blocks.get(child, ())}
        parameters = set(module.parameters())
        name = type(module).__name__
        class_names.add(name)
        is_block = name in classes if classes else min_parameters is None and module in listed
        if min_parameters is not None:
            count = sum(parameter.numel() for parameter in parameters - of_inner_blocks)
            is_block = is_block or count >= min_parameters
        if is_block and module is not model and parameters:
            blocks[module] = None
            of_inner_blocks = parameters
        in_blocks[module] = of_inner_blocks
    if unknown := [name for name in classes if name not in class_names]:
        raise ConfigError(
            f"parallel.wrap names {', '.join(unknown)}, but the model has no module of such a class",
            location="parallel.wrap",
            hint=f"It has {', '.join(sorted(class_names)[:12])}.",
        )
    return list(blocks)


def without_tied(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with a module outside of them.

    A tied weight must be gathered whenever one of its modules is computed, so it stays with the model.
    """

    def count_uses(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))

    uses = count_uses(model)
    return [
        block for block in blocks if all(uses[parameter] == count for parameter, count in count_uses(block).items())
    ]


def recompute(blocks: Sequence[nn.Module]) -> None:
    """Keep only the inputs of each block for the backward, which computes the block again. Names stay as they are."""
    for block in blocks:
        # An attribute of the instance, not a wrapping module: state dicts keep the names of parameters.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
