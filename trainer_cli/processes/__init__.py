"""The processes of a fit: compose its config, choose the process that trains it, train as one rank of many.

`compose_fit` composes; `fit_in_processes` trains in this process, as a rank, or in child processes, which an add-on
starts. A process that has a parent ends with it, for whatever reason the parent ends (`stop_with_parent`). Rank 0
composes the config for all ranks, and only the rank that fails reports the error.

Begin with `fit.py`, then `rank.py`.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.processes.child import own_command as own_command, stop_with_parent as stop_with_parent
    from trainer_cli.processes.fit import (
        compose_fit as compose_fit,
        fit_in_processes as fit_in_processes,
        provide_fork as provide_fork,
    )
    from trainer_cli.processes.override_text import text_of as text_of
    from trainer_cli.processes.rank import run_as_rank as run_as_rank

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "child": "own_command stop_with_parent",
            "fit": "compose_fit fit_in_processes provide_fork",
            "override_text": "text_of",
            "rank": "run_as_rank",
        },
    )
