from trainer_cli.schema.checkpoint_config import (
    CheckpointConfig as CheckpointConfig,
    CheckpointFormat as CheckpointFormat,
    Compression as Compression,
    DigestAlgorithm as DigestAlgorithm,
    KeepBestConfig as KeepBestConfig,
    Newer as Newer,
    Removal as Removal,
)
from trainer_cli.schema.sections import (
    ANEW as ANEW,
    RESUME_WORDS as RESUME_WORDS,
    SYSTEM as SYSTEM,
    Dtype as Dtype,
    LoadConfig as LoadConfig,
    LoggingConfig as LoggingConfig,
    LoopConfig as LoopConfig,
    ModelCall as ModelCall,
    ParallelConfig as ParallelConfig,
    ParallelStrategy as ParallelStrategy,
    PrecisionConfig as PrecisionConfig,
    SchedulerInterval as SchedulerInterval,
    TrainConfig as TrainConfig,
)
