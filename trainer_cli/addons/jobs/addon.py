"""What the add-on `jobs` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={
        "_job": Verb("trainer_cli.addons.jobs.job"),
        "_store": Verb("trainer_cli.addons.jobs.store"),
    },
)
