"""Trainings in processes of their own: restarts, ranks that are started here, sweeps, and jobs submitted to Slurm.

`fit_in_children` trains a config in a child that is restarted after a failure, or in one process for each rank.
`run_sweep` runs one such fit for each combination of values; `plan_jobs` composes and checks them all first.

It promises:
- A child is an ordinary `train fit`, which resumes: to repeat a command continues what it began.
- Every child ends with its parent, even if that is killed: it saves and exits.
- A signal is passed on to all children; each saves and exits with 75, and no other one begins.
- All jobs of a sweep are checked before the first begins and before anything is written.
- Jobs and restarts train what was submitted: an edit of the project after the start of the command changes nothing.
- A job that fails does not stop the others. The state of a job is read from its run's directory, not remembered.
- A fork of the server behaves as a fresh process; where that is not sure, a fresh one is started.

Begin with `supervise`, then `sweep`; `fork_server` saves the seconds in which each process would import torch. No
other package takes a name from this one: what the core asks for is a part in `addon.py`.
"""
