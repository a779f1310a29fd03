"""What the add-on `auto` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(
    names={
        "trainer_cli.addons.auto.find": "find_batch_size find_learning_rate",
    },
)
