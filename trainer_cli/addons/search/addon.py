"""What the add-on `search` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(
    parts={
        "sweep.search": "trainer_cli.addons.search.search:Search",
        "search.optuna": "trainer_cli.addons.search.draws:draw_by_optuna",
        "search.random": "trainer_cli.addons.search.draws:draw_at_random",
    },
)
