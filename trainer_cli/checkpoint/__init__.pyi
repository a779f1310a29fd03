from trainer_cli.checkpoint.checkpointer import (
    Checkpointer as Checkpointer,
    make_sync_checkpointer as make_sync_checkpointer,
)
from trainer_cli.checkpoint.disk_errors import disk_error as disk_error
from trainer_cli.checkpoint.disk_space import (
    FreeSpace as FreeSpace,
    NeededSpace as NeededSpace,
    files_of_checkpoint as files_of_checkpoint,
    find_shortage as find_shortage,
)
from trainer_cli.checkpoint.group_verify import GroupVerifier as GroupVerifier
from trainer_cli.checkpoint.save import (
    CheckpointMetadata as CheckpointMetadata,
    InFlightSave as InFlightSave,
    SaveCaller as SaveCaller,
    SaveJob as SaveJob,
    errors_of_save as errors_of_save,
    library_versions as library_versions,
)
from trainer_cli.checkpoint.weights import read_evaluated_weights as read_evaluated_weights
from trainer_cli.checkpoint.writer_thread import WriterThread as WriterThread
