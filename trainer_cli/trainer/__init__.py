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

add_lazy_names(globals())
