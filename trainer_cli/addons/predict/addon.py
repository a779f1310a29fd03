"""What the add-on `predict` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={
        "predict": Verb(
            "trainer_cli.addons.predict.predict_command",
            "write a model's outputs for every sample of a dataset",
            after="validate",
            loads_torch=True,
        ),
    },
    components=("trainer_cli.addons.predict.prediction_writers",),
    bases=("trainer_cli.addons.predict.prediction_writers:PredictionWriter",),
    names={
        "trainer_cli.addons.predict.prediction_writers": "ParquetWriter PredictionWriter",
    },
)
