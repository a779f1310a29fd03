"""What the add-on `stores` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn()
