"""Trainings in processes of their own: restarts, ranks that are started here, sweeps, and jobs submitted to Slurm.

`fit_in_processes` trains a config in this process, in a child that is restarted after a failure, or in one process for
each rank. `run_sweep` runs one such fit for each combination of values; `plan_jobs` composes and checks them all first.

It promises:
- A child is an ordinary `train fit`, which resumes: to repeat a command continues what it began.
- Every child ends with its parent, for whatever reason that ends (`stop_with_parent`): it saves and exits.
- A signal is passed on to all children; each saves and exits with 75, and no other one begins.
- All jobs of a sweep are checked before the first begins and before anything is written.
- A job that fails does not stop the others. The state of a job is read from its run's directory, not remembered.
- A fork of the server behaves as a fresh process; where that is not sure, a fresh one is started.

Begin with `supervise`, then `sweep`; `fork_server` saves the seconds in which each process would import torch.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.addons.jobs.fork_server import own_command as own_command
    from trainer_cli.addons.jobs.fork_server import serve_forks as serve_forks
    from trainer_cli.addons.jobs.launch import launch_ranks as launch_ranks
    from trainer_cli.addons.jobs.supervise import compose_fit as compose_fit
    from trainer_cli.addons.jobs.supervise import fit_in_processes as fit_in_processes
    from trainer_cli.addons.jobs.supervise import run_as_rank as run_as_rank
    from trainer_cli.addons.jobs.supervise import stop_with_parent as stop_with_parent
    from trainer_cli.addons.jobs.sweep import plan_jobs as plan_jobs
    from trainer_cli.addons.jobs.sweep import run_sweep as run_sweep

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "fork_server": "own_command serve_forks",
            "launch": "launch_ranks",
            "supervise": "compose_fit fit_in_processes run_as_rank stop_with_parent",
            "sweep": "plan_jobs run_sweep",
        },
    )
