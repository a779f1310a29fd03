from trainer_cli.tensor_files.elements import (
    DTYPES as DTYPES,
    TORCH_DTYPES as TORCH_DTYPES,
    Leaf as Leaf,
    bytes_of as bytes_of,
    check_booleans as check_booleans,
    memory_key as memory_key,
    memory_of as memory_of,
    new_tensor as new_tensor,
)
from trainer_cli.tensor_files.header import (
    ELEMENT_BYTES as ELEMENT_BYTES,
    LINE as LINE,
    TensorEntry as TensorEntry,
    read_entries as read_entries,
    render_header as render_header,
)
from trainer_cli.tensor_files.live_tensors import LiveTensors as LiveTensors, TensorName as TensorName
from trainer_cli.tensor_files.reading import read_tensors as read_tensors
from trainer_cli.tensor_files.verified_file import (
    Destination as Destination,
    VerifiedFile as VerifiedFile,
    read_verified as read_verified,
    verify as verify,
)
