from trainer_cli.layout.naming import (
    CONFIG_FILE as CONFIG_FILE,
    COPIES_CACHE as COPIES_CACHE,
    MANIFEST_FILE as MANIFEST_FILE,
    MODEL_CONFIG_FILE as MODEL_CONFIG_FILE,
    PINNED_FILE as PINNED_FILE,
    STEP_MODULES as STEP_MODULES,
    SWEEP_FOLDER as SWEEP_FOLDER,
    VARIABLES as VARIABLES,
    Naming as Naming,
    class_name as class_name,
    in_runs as in_runs,
    is_plain as is_plain,
    is_run_id as is_run_id,
    numbers_within as numbers_within,
    parse_step as parse_step,
    step_within as step_within,
)
from trainer_cli.layout.parts import PartTable as PartTable
from trainer_cli.layout.shards import PER_RANK as PER_RANK, Shard as Shard, spread as spread
