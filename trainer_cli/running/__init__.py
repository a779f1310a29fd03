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

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.running.build import Builder as Builder, Data as Data, make_identity as make_identity
    from trainer_cli.running.ending import validate_command as validate_command
    from trainer_cli.running.fitting import fit as fit
    from trainer_cli.running.plan_view import describe_plan as describe_plan
    from trainer_cli.running.planning import plan as plan
    from trainer_cli.running.reach import own_folder as own_folder
    from trainer_cli.running.results import Results as Results
    from trainer_cli.running.start import (
        Start as Start,
        accepted_changes as accepted_changes,
        fork_path as fork_path,
        kept_settings as kept_settings,
        refuse_anew as refuse_anew,
        refuse_no_optimizer as refuse_no_optimizer,
        values_found as values_found,
    )
    from trainer_cli.running.torch_import import import_torch as import_torch, showing_import as showing_import
    from trainer_cli.running.validation import run_or_place as run_or_place, validate as validate

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "build": "Builder Data make_identity",
            "ending": "validate_command",
            "fitting": "fit",
            "plan_view": "describe_plan",
            "planning": "plan",
            "reach": "own_folder",
            "results": "Results",
            "start": "accepted_changes fork_path kept_settings refuse_anew refuse_no_optimizer Start values_found",
            "torch_import": "import_torch showing_import",
            "validation": "run_or_place validate",
        },
    )
