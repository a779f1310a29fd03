from trainer_cli.data.adapt import as_loader as as_loader, as_val_loaders as as_val_loaders
from trainer_cli.data.digest import (
    digest_of as digest_of,
    other_samples as other_samples,
    sample_digests as sample_digests,
)
from trainer_cli.data.loader import (
    LOADING as LOADING,
    Loader as Loader,
    MapDataset as MapDataset,
    PaddingBatch as PaddingBatch,
    SharedLoader as SharedLoader,
)
from trainer_cli.data.order import (
    ORDER_VERSION as ORDER_VERSION,
    sample_indices as sample_indices,
    sample_position as sample_position,
    sample_seed as sample_seed,
)
from trainer_cli.data.position import length_of as length_of
from trainer_cli.data.random_state import kept_random_state as kept_random_state
from trainer_cli.data.stream import StreamLoader as StreamLoader
from trainer_cli.data.user_loader import UserLoader as UserLoader, generators_of as generators_of
from trainer_cli.data.workers import Workers as Workers
