from trainer_cli.trainer.evaluate import Evaluation as Evaluation, refuse_absent_loaders as refuse_absent_loaders
from trainer_cli.trainer.finite import not_finite as not_finite
from trainer_cli.trainer.full_disk import stopped_step as stopped_step
from trainer_cli.trainer.hooks import Callback as Callback
from trainer_cli.trainer.metric_logger import Interruption as Interruption
from trainer_cli.trainer.precision import LossScaler as LossScaler, Precision as Precision
from trainer_cli.trainer.predict import Predictor as Predictor
from trainer_cli.trainer.prefetch import TrainBatches as TrainBatches
from trainer_cli.trainer.setup import pick_device as pick_device, seed_everything as seed_everything
from trainer_cli.trainer.state import (
    capture as capture,
    describe as describe,
    load_all as load_all,
    with_settings as with_settings,
)
from trainer_cli.trainer.trainer import Trainer as Trainer
from trainer_cli.trainer.training_loop import FitResult as FitResult, TrainingLoop as TrainingLoop
from trainer_cli.trainer.validation_loop import ValidationLoop as ValidationLoop
