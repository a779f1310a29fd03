"""How many processes train one model: one (`Single`), copies of it (`DDP`), or shards (`FSDP`).

A `Strategy` places the model, averages gradients, clips their norm and prepares an evaluation or a save. All of it is
collective: every rank calls the same methods in the same order. `Trainer` knows the interface alone, so a program may
pass a strategy of its own. Gradients are added in the same order at every step: a resumed step has the bits of an
uninterrupted one.

`find_blocks` finds the modules that FSDP shards as units, and whose forward `recompute` repeats in the backward.

Begin with `strategy.py`: the interface, and two of its implementations. `fsdp.py` is imported only where it is used,
because the parts of torch that it needs take long to import.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
