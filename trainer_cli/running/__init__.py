"""A run from the composed config to its exit code: start, resume, build, fit, plan and validate.

`fit` trains or resumes, `plan` says what it would do, `validate` evaluates checkpoints. All three begin with a config
that is composed and checked. `Start` is the decision with which a fit begins: the run, its identity, and the checkpoint
to resume. `Builder` makes the objects that a config describes; it alone instantiates a `_target_`.

It promises:
- A run that has a checkpoint after step 0 never starts from step 0 by itself.
- Until the objects are made and the data is compared, an error leaves no directory of a new run and no attempt.
- A resume under a changed config is refused before a checkpoint is quarantined or a file is written.
- A plan writes, locks and trains nothing.
- A config that was found on disk writes only into the directory of its run (`reach`).

With several ranks, rank 0 locks the run, chooses the checkpoint and writes the files; the others follow its decisions.

torch is imported by `build` and what needs it, while the checkpoint to resume is verified. A finished run is reported
without it.

Begin with `fitting`, whose first lines are the order of a fit, then `start`.
"""

from trainer_cli.lazy import add_lazy_names

add_lazy_names(globals())
