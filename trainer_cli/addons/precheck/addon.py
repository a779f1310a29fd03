"""What the add-on `precheck` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn, Verb

ADDON = AddOn(
    verbs={"_probe": Verb("trainer_cli.addons.precheck.probe")},
    parts={
        "check.checks": "trainer_cli.addons.precheck.commands:CHECKS",
        "plan.probe": "trainer_cli.addons.precheck.probe:probe",
    },
)
