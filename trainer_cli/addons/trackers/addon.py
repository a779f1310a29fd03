"""What the add-on `trackers` brings."""

from __future__ import annotations

import os

from trainer_cli.addon import AddOn

ADDON = AddOn(
    configs=os.path.join(os.path.dirname(__file__), "configs"),
    components=("trainer_cli.addons.trackers",),
    names={
        "trainer_cli.addons.trackers.mlflow": "MlflowLogger",
        "trainer_cli.addons.trackers.trackio": "TrackioLogger",
        "trainer_cli.addons.trackers.wandb": "WandbLogger",
    },
)
