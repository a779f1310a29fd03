"""What a run directory holds: how a training writes it, and how everybody reads it.

`RunDir` is the directory of one run: its files, its lock, its id, and the record of each attempt (the table at the top
of `run_dir` has the files). `Run` reads a run from its files, while it trains or after: `look` is its state now
(`RunView`), `record` everything that it did (`RunRecord`), `until` the run as an attempt left it; `RunsBelow` finds and
follows all runs below a folder.
`BestSettings` is what a run's config says about which value, and so which checkpoint or run, is best.

It promises:
- One process trains in a directory: `RunDir.lock` refuses a second one and names the first.
- A directory without `config.yaml` was never a run; the file is written last, and every file is replaced as a whole or
  grows by lines.
- Reading never writes, never waits for the lock, and imports no torch; numpy only for a record.
- What is damaged, half-written or written by another program is left out and named in `problems`, and the rest is read.
- A file is read again only after it has changed, and of a file of lines only those that are new.

It decides nothing about a training: whether and from where a run resumes is decided in `running`.

Begin with `run_dir`, then `run`.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
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

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "columns": "Columns Series",
            "damage": "collecting",
            "find_runs": "refuse_nested",
            "log_messages": "MessageFilter",
            "metrics": "BestSettings",
            "record": "RunRecord RunView SavedCheckpoint",
            "replayed": "replayed_entries",
            "run": "Run RunsBelow split_attempt",
            "run_dir": "is_checkpoint Outcome read_json RunDir write_json",
            "stored_values": "read_text",
            "validation_rows": "ValidationRow",
        },
    )
