from trainer_cli.batches.contents import (
    describe_batch as describe_batch,
    is_dense as is_dense,
    leading_size as leading_size,
    tensors_of as tensors_of,
    to_device as to_device,
)
from trainer_cli.batches.nan_rows import rows_with_nan as rows_with_nan
from trainer_cli.batches.samples import SampleCheck as SampleCheck, sample_count as sample_count
from trainer_cli.batches.split import split_batch as split_batch
