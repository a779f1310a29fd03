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
