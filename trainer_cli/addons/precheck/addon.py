"""What the add-on `precheck` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(parts={"check.checks": "trainer_cli.addons.precheck.commands:CHECKS"})
