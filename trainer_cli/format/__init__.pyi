from trainer_cli.format.base import Format as Format
from trainer_cli.format.file_layout import FileLayout as FileLayout, lay_out as lay_out
from trainer_cli.format.open import new_format as new_format
from trainer_cli.format.rank_files import FilesOfRank as FilesOfRank
from trainer_cli.format.readable import check_readable as check_readable
from trainer_cli.format.reader import CheckpointReader as CheckpointReader, StateReader as StateReader
from trainer_cli.format.sharded import (
    RANKS as RANKS,
    DividedFormat as DividedFormat,
    ShardedFormat as ShardedFormat,
    TensorsFormat as TensorsFormat,
    decoded_state as decoded_state,
)
from trainer_cli.format.stored import StoredState as StoredState, StoredTensor as StoredTensor
from trainer_cli.format.tree import Undecodable as Undecodable, decode as decode, encode as encode
