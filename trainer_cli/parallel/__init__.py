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

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
