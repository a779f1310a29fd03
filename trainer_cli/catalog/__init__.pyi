from trainer_cli.catalog.catalog import (
    Catalog as Catalog,
    Check as Check,
    Entry as Entry,
    examine as examine,
    newest_of_all as newest_of_all,
    verify_and_decode as verify_and_decode,
)
from trainer_cli.catalog.find import (
    checkpoint_at as checkpoint_at,
    expanded as expanded,
    filled as filled,
    path_to_save as path_to_save,
    paths_of as paths_of,
    split_existing as split_existing,
)
from trainer_cli.catalog.foreign_kind import ForeignKind as ForeignKind, refuse_foreign as refuse_foreign
from trainer_cli.catalog.history import CheckpointHistory as CheckpointHistory, Life as Life, Spent as Spent
from trainer_cli.catalog.path_variables import rank_variables_in as rank_variables_in
