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
