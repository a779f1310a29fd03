"""The processes of a fit: compose its config, choose the process that trains it, train as one rank of many.

`compose_fit` composes; `fit_in_processes` trains in this process, as a rank, or in child processes, which an add-on
starts. A process that has a parent ends with it, for whatever reason the parent ends (`stop_with_parent`). Rank 0
composes the config for all ranks, and only the rank that fails reports the error.

Begin with `fit.py`, then `rank.py`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
