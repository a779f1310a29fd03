"""What the add-on `compare` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={
        "compare": Verb(
            "trainer_cli.addons.compare.command",
            "train A and B with the same seeds, and say whether B is better than A",
            after="plan",
            error_offset=64,
        ),
    },
)
