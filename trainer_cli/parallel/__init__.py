"""The processes that train one model: how they meet, exchange small values, and find out which one is lost.

A `ProcessGroup` is one process (`ALONE`, which imports no torch) or the ranks that torchrun or srun started
(`join_processes`). Its methods are collective: every rank calls the same ones in the same order, from one thread.
Values go through a group of gloo of their own, so they never mix with the collectives of a training. Nothing here knows
models, checkpoints or configs.

- What one rank does alone is in `leading` or `on_main`, what may fail on some in `checking`: if it fails on one rank,
  the others raise `PeerError` with its reason instead of waiting. `LostRankError` names a rank that has ended or hangs.
- `Agreement` is the one sum of a step: weight, samples, requests, written checkpoints. Decisions that depend on its
  results alone are the same on every rank.
- `check_same…` compare what the ranks see before a training goes wrong in silence.

Begin with `process_group.py`; `distributed_group.py` has the group of more than one process. `rendezvous.py` has the
store by which ranks meet and are found lost, `direct.py` sums between ranks of one machine over sockets.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.parallel.agreement import Agreement as Agreement
    from trainer_cli.parallel.distributed_group import (
        find_default_group as find_default_group,
        join_processes as join_processes,
    )
    from trainer_cli.parallel.peer_errors import (
        LostRankError as LostRankError,
        PeerError as PeerError,
        is_of_peer as is_of_peer,
        noted_activity as noted_activity,
        noting as noting,
    )
    from trainer_cli.parallel.process_group import (
        ALONE as ALONE,
        ProcessGroup as ProcessGroup,
        describe_lone_rank as describe_lone_rank,
        find_default_ranks as find_default_ranks,
        imitate_group as imitate_group,
    )
    from trainer_cli.parallel.rendezvous import serve_store as serve_store
    from trainer_cli.parallel.same import (
        check_same as check_same,
        check_same_file as check_same_file,
        check_same_losses as check_same_losses,
        check_same_samples as check_same_samples,
    )

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "agreement": "Agreement",
            "distributed_group": "find_default_group join_processes",
            "peer_errors": "is_of_peer LostRankError noted_activity noting PeerError",
            "process_group": "ALONE describe_lone_rank find_default_ranks imitate_group ProcessGroup",
            "rendezvous": "serve_store",
            "same": "check_same check_same_file check_same_losses check_same_samples",
        },
    )
