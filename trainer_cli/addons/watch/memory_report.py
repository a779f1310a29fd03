"""After an allocation that failed: the largest tensors that live, and a snapshot of the allocator on CUDA."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from trainer_cli.dtensor import local_of
from trainer_cli.terminal import format_count
from trainer_cli.torch_compat import dump_cuda_memory
from trainer_cli.trainer import Trainer

_OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory", re.IGNORECASE)


def note_tensors(error: BaseException, trainer: Trainer, run: Path) -> None:
    """Add the largest tensors to an error of memory that is lacking, and write all of them into the run directory."""
    if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
        return
    names = {id(tensor): name for name, tensor in _name_tensors(trainer)}
    rows: dict[int, tuple[int, str]] = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor):
            # Some tensors, such as those of a compiler, have no storage.
            with suppress(RuntimeError, NotImplementedError):
                storage = local_of(tensor).untyped_storage()
                name = names.get(id(tensor), "tensor")
                text = f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device}"
                # Of many tensors of one storage that with a name.
                size, before = rows.get(storage.data_ptr(), (storage.nbytes(), text))
                rows[storage.data_ptr()] = size, before if name == "tensor" else text
    lines = [f"{size / 2**20:12,.1f} MiB  {text}" for size, text in sorted(rows.values(), reverse=True)]
    path, count = run / f"out_of_memory.rank{trainer.strategy.group.rank}.txt", format_count(len(rows), "tensor")
    shown = lines[: min(5, sum(size >= 1 << 20 for size, _ in rows.values()))]
    note = "\n".join([f"the largest of {count} that Python holds, as in {path}:", *shown])
    if not shown:
        note = f"none of {count} that Python holds, as in {path}, has 1 MiB"
    # The error of a disk must not take the place of this one.
    with suppress(OSError):
        path.write_text("\n".join(lines), encoding="utf-8")
        if trainer.device.type == "cuda" and dump_cuda_memory(path.with_suffix(".pickle")):
            note += f"\nthe allocator's state, for https://pytorch.org/memory_viz: {path.with_suffix('.pickle')}"
    error.add_note(note)


def _name_tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor | None]]:
    """Parameters, gradients, buffers and what optimizers keep, with their names."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in trainer.model.named_parameters()}
    yield from trainer.model.named_buffers()
    for parameter, name in names.items():
        yield f"parameter {name}", parameter
        yield f"gradient of {name}", parameter.grad
    for optimizer in trainer.optimizers.values():
        for owner, state in optimizer.state.items():
            for key, value in state.items():
                yield f"{key} of {names.get(owner)} in the optimizer", value
