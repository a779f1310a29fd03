from trainer_cli.selection.holds import Holds as Holds
from trainer_cli.selection.patterns import (
    NamedFolder as NamedFolder,
    Selection as Selection,
    best_of as best_of,
    ckpt_argument as ckpt_argument,
    has_step as has_step,
    named_path as named_path,
    named_steps as named_steps,
    run_of as run_of,
    select as select,
    select_all as select_all,
    select_one as select_one,
    suggest_nearby as suggest_nearby,
    suggest_selector as suggest_selector,
)
from trainer_cli.selection.provide import provide_steps as provide_steps
from trainer_cli.selection.stored import StoredCheckpoint as StoredCheckpoint, run_holding as run_holding
