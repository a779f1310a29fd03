"""The trainer: the loops that train and evaluate a model, what one step does, and the hooks around it.

`Trainer` joins model, optimizers, data, callbacks and loggers. `TrainingLoop` counts and decides what comes next,
`TrainStep` makes one optimizer step, `ValidationLoop` evaluates on one loader, `Callback` lists the hooks in the order
of their calls. Between two events (log, evaluation, save, end) the loop only trains.

- A training that is resumed at any step ends with the same bits as one that went through. For this `capture` returns
  all that a step depends on, `load_all` loads it after every part was compared, and the random state is restored last,
  right before the first step.
- What a callback, a display or an evaluation draws or changes does not reach the training.
- With several ranks rank 0 decides, and all follow at the same step; one sum a step carries what they tell each other.
- The trainer decides nothing about checkpoints but when there is an opportunity: a `checkpoint` that it is given saves.
- It knows no config, no run directory and no command. Importing it loads neither checkpoints nor formats.

Begin with `trainer.py`, then `training_loop.py` and `train_step.py`.
"""

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
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

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "evaluate": "Evaluation refuse_absent_loaders",
            "finite": "not_finite",
            "full_disk": "stopped_step",
            "hooks": "Callback",
            "metric_logger": "Interruption",
            "precision": "LossScaler Precision",
            "predict": "Predictor",
            "prefetch": "TrainBatches",
            "setup": "pick_device seed_everything",
            "state": "capture describe load_all with_settings",
            "trainer": "Trainer",
            "training_loop": "FitResult TrainingLoop",
            "validation_loop": "ValidationLoop",
        },
    )
