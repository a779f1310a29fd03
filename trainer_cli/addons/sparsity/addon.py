"""What the add-on `sparsity` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(
    components=("trainer_cli.addons.sparsity",),
    names={
        "trainer_cli.addons.sparsity.selective_grad": "SelectiveGrad",
        "trainer_cli.addons.sparsity.sparse_training": "GMP RigL SET Static",
    },
)
