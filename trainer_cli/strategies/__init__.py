"""How many processes train one model: one (`Single`), copies of it (`DDP`), or shards (`FSDP`).

A `Strategy` places the model, averages gradients, clips their norm and prepares an evaluation or a save. All of it is
collective: every rank calls the same methods in the same order. `Trainer` knows the interface alone, so a program may
pass a strategy of its own. Gradients are added in the same order at every step: a resumed step has the bits of an
uninterrupted one.

`find_blocks` finds the modules that FSDP shards as units, and whose forward `recompute` repeats in the backward.

Begin with `strategy.py`: the interface, and two of its implementations. `fsdp.py` is imported only where it is used,
because the parts of torch that it needs take long to import.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.strategies.blocks import find_blocks as find_blocks, recompute as recompute
    from trainer_cli.strategies.fsdp import FSDP as FSDP
    from trainer_cli.strategies.strategy import DDP as DDP, Single as Single, Strategy as Strategy

    __all__: list[str]
else:
    add_lazy_names(globals(), {"blocks": "find_blocks recompute", "fsdp": "FSDP", "strategy": "DDP Single Strategy"})
