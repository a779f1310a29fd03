"""What the add-on `watch` brings."""

from __future__ import annotations

import os

from trainer_cli.addon import AddOn

ADDON = AddOn(
    configs=os.path.join(os.path.dirname(__file__), "configs"),
    components=("trainer_cli.addons.watch",),
    parts={
        "fit.at_end": "trainer_cli.addons.watch.notify:notify_at_end",
        "observe.fit": "trainer_cli.addons.watch.watch:observe_fit",
    },
    names={"trainer_cli.addons.watch.loss_spike": "LossSpike"},
)
