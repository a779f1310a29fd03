from trainer_cli.runs.columns import Columns as Columns, Series as Series
from trainer_cli.runs.damage import collecting as collecting
from trainer_cli.runs.find_runs import refuse_nested as refuse_nested
from trainer_cli.runs.log_messages import MessageFilter as MessageFilter
from trainer_cli.runs.metrics import BestSettings as BestSettings
from trainer_cli.runs.record import RunRecord as RunRecord, RunView as RunView, SavedCheckpoint as SavedCheckpoint
from trainer_cli.runs.replayed import replayed_entries as replayed_entries
from trainer_cli.runs.run import Run as Run, RunsBelow as RunsBelow, split_attempt as split_attempt
from trainer_cli.runs.run_dir import (
    Outcome as Outcome,
    RunDir as RunDir,
    is_checkpoint as is_checkpoint,
    read_json as read_json,
    write_json as write_json,
)
from trainer_cli.runs.stored_values import read_text as read_text
from trainer_cli.runs.validation_rows import ValidationRow as ValidationRow
