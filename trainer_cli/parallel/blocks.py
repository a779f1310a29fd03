"""The blocks of a model: what is sharded, and computed again in the backward, as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_cli.errors import ConfigError


def blocks_of(model: nn.Module, classes: Sequence[str] = (), min_parameters: int | None = None) -> list[nn.Module]:
    """The blocks of a model, inner ones first; the model itself is none.

    Args:
        classes: names of their classes; not given: the modules in each ModuleList, as of the layers of a transformer.
        min_parameters: blocks too are modules that have this many parameters beside those of blocks inside them.

    Raises:
        ConfigError: no module is of one of the classes.
    """
    found: dict[nn.Module, None] = {}
    inside: dict[nn.Module, set[nn.Parameter]] = {}
    listed = {child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    seen: set[str] = set()
    for module in reversed(list(model.modules())):
        taken = {one for child in module.children() for one in inside.get(child, ())}
        own = set(module.parameters())
        name = type(module).__name__
        seen.add(name)
        is_block = name in classes if classes else min_parameters is None and module in listed
        if min_parameters is not None:
            is_block = is_block or sum(one.numel() for one in own - taken) >= min_parameters
        if is_block and module is not model and own:
            found[module] = None
            taken = own
        inside[module] = taken
    if unknown := [name for name in classes if name not in seen]:
        raise ConfigError(
            f"parallel.wrap names {', '.join(unknown)}, but the model has no module of such a class",
            location="parallel.wrap",
            hint=f"It has {', '.join(sorted(seen)[:12])}.",
        )
    return list(found)


def apart(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with a module outside of them: tied weights are gathered together."""

    def uses(module: nn.Module) -> Counter[nn.Parameter]:
        return Counter(one for _, one in module.named_parameters(remove_duplicate=False))

    all_uses = uses(model)
    return [block for block in blocks if all(all_uses[one] == count for one, count in uses(block).items())]


def recompute(blocks: Sequence[nn.Module]) -> None:
    """Keep only the inputs of each block for the backward, which computes the block again. Names stay as they are."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
