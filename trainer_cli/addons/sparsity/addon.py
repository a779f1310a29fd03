"""What the add-on `sparsity` brings."""

from __future__ import annotations

import os

from trainer_cli.addon import AddOn

ADDON = AddOn(
    configs=os.path.join(os.path.dirname(__file__), "configs"),
    components=("trainer_cli.addons.sparsity",),
    names={
        "trainer_cli.addons.sparsity.selective_grad": "SelectiveGrad",
        "trainer_cli.addons.sparsity.sparse_training": "GMP RigL SET Static",
    },
)
