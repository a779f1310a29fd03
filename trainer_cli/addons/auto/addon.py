"""What the add-on `auto` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(
    parts={"fit.find_auto": "trainer_cli.addons.auto.decisions:find_values"},
    names={
        "trainer_cli.addons.auto.find": "find_batch_size find_learning_rate",
    },
)
