"""Loggers, which write the records of a training to files, displays and services, and can be rewound to a step.

`Logger` (`base.py`) says in which order its methods are called. `Record` holds all that is logged at one step, in plain
numbers and arrays. A trainer gives each logger every record once, in the order of steps, by a `RecordKeeper`, which
keeps what cannot be written now; a service never ends a training.

- After a resume a file holds exactly the records up to that step and the new ones: `rewind` drops the rest, and a crash
  midway loses nothing. A `Mark` in the checkpoint says how long the file was, so that only the rest is read again.
- What is logged up to a checkpoint is on the disk before that checkpoint is committed.
- `MetricRange` is the smallest, largest and newest value of a validation metric over all records.
- Displays run in threads of their own, and read snapshots (`Now`); they change nothing of a training.

Importing a logger imports neither torch nor the library of a service. This package knows nothing of trainers, and of
run directories only the path that it is given.

Begin with `base.py`, then `text_files.py`.
"""

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.loggers.base import (
        SAVES as SAVES,
        Logger as Logger,
        Now as Now,
        Pauses as Pauses,
        Record as Record,
        RunFacts as RunFacts,
        Table as Table,
        import_extra as import_extra,
    )
    from trainer_cli.loggers.bottom_lines import BottomLines as BottomLines
    from trainer_cli.loggers.display import make_display as make_display
    from trainer_cli.loggers.marks import (
        Mark as Mark,
        MetricRange as MetricRange,
        is_validation_metric as is_validation_metric,
        loader_of as loader_of,
    )
    from trainer_cli.loggers.media import MEDIA_FILE as MEDIA_FILE, MEDIA_FOLDER as MEDIA_FOLDER
    from trainer_cli.loggers.progress_bar import BarStyle as BarStyle
    from trainer_cli.loggers.record_keeper import RecordKeeper as RecordKeeper
    from trainer_cli.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from trainer_cli.loggers.text_files import JsonlLogger as JsonlLogger

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "base": "import_extra Logger Now Pauses Record RunFacts SAVES Table",
            "bottom_lines": "BottomLines",
            "display": "make_display",
            "marks": "is_validation_metric loader_of Mark MetricRange",
            "media": "MEDIA_FILE MEDIA_FOLDER",
            "progress_bar": "BarStyle",
            "record_keeper": "RecordKeeper",
            "tensorboard": "TensorBoardLogger",
            "text_files": "JsonlLogger",
        },
    )
