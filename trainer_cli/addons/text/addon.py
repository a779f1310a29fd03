"""What the add-on `text` brings."""

from __future__ import annotations

import os

from trainer_cli.addon import AddOn

ADDON = AddOn(
    configs=os.path.join(os.path.dirname(__file__), "configs"),
    parts={"data.find_origin": "trainer_cli.addons.text.origin:find_origin"},
    components=("trainer_cli.addons.text",),
    names={
        "trainer_cli.addons.text.gpt": "GPT",
        "trainer_cli.addons.text.lora": "lora",
        "trainer_cli.addons.text.mixture": "Mixture",
        "trainer_cli.addons.text.text": "Documents Packing Text",
        "trainer_cli.addons.text.tokens": "TokenFiles",
    },
)
