"""Checks at the start of a training: every rank sees the files of rank 0, and trains the same."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import ProcessGroup

if TYPE_CHECKING:
    from torch import Tensor

_POLL_S = 0.2
_ROUNDING = 0.01
"""Relative difference allowed between losses of a tensor group: copies of a weight may differ in the last digits."""
APPEARS_IN_S = 60.0
"""A network file system may cache for a minute that a file does not exist, or its old content."""


def check_same_file(group: ProcessGroup, file: Path) -> None:
    """Check that every rank reads the same content of a file as rank 0. Collective.

    Raises:
        UserError: on every rank, with the ranks and machines that do not.
    """
    digest = group.broadcast(_digest(file))
    deadline = time.monotonic() + APPEARS_IN_S
    while not (seen := _digest(file) == digest) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    answers = group.gather((seen, socket.gethostname()))
    blind = [f"rank {rank} ({host})" for rank, (sees, host) in enumerate(answers) if not sees]
    if blind:
        # Rank 0's path: that of another rank may differ, which is the mistake.
        where = group.broadcast(str(file.parent.absolute()))
        raise UserError(
            f"{', '.join(blind)} cannot see {where}, the run directory of rank 0 ({answers[0][1]})",
            where="run_dir",
            cure="Choose a run_dir= on a file system that all machines share.",
        )


def check_same(
    group: ProcessGroup, facts: Mapping[str, object], *, where: str | None = None, cure: str | None = None
) -> None:
    """Check that every rank has rank 0's values of some facts. Collective.

    Raises:
        UserError: on every rank, with the first fact that differs, and the ranks where it does.
    """
    facts_of_ranks = group.gather(dict(facts))
    for name, value in facts_of_ranks[0].items():
        values = [rank_facts[name] for rank_facts in facts_of_ranks]
        different = [f"{other} on rank {rank}" for rank, other in enumerate(values) if other != value]
        if different:
            raise UserError(
                f"the ranks do not have the same {name}: {value} on rank 0, {', '.join(different)}",
                where=where,
                cure=cure,
            )


def check_same_samples(group: ProcessGroup, tensors: Iterable[Tensor]) -> None:
    """Check that all ranks of each tensor group have the same tensors of a batch. Collective.

    Raises:
        UserError: on every rank, with the first rank whose samples differ from those of the first of its group.
    """
    # Imported here: a start looks for the files of rank 0 before it loads torch.
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        # A sparse tensor does not have its values in one piece of memory.
        if tensor.layout is torch.strided:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digests = group.gather(digest.hexdigest())
    for rank, rank_digest in enumerate(digests):
        first = rank - rank % group.tensor_size
        if rank_digest != digests[first]:
            raise UserError(
                f"ranks {first} and {rank} divide layers between them, and have different samples",
                where="parallel.tensor_size",
                cure="A loader or sampler that takes a part of the samples must take part "
                "trainer.strategy.group.data_rank of data_size.",
            )


def check_same_losses(group: ProcessGroup, losses: Sequence[float]) -> None:
    """Check that the losses of the ranks are the same in each tensor group, except for rounding.

    Raises:
        UserError: with the first rank whose loss differs from that of the first of its group.
    """
    for rank, loss in enumerate(losses):
        first = rank - rank % group.tensor_size
        if abs(loss - losses[first]) > _ROUNDING * abs(losses[first]):
            raise UserError(
                f"ranks {first} and {rank} divide layers between them, and have different losses",
                where="parallel.tensor_size",
                cure="Check the model's plan: after a colwise layer a process has only its part of the features, until "
                "a rowwise layer.",
            )


def _digest(file: Path) -> str | None:
    """The digest of a file's bytes; None if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
