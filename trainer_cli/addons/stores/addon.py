"""What the add-on `stores` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(
    parts={
        "copies.open": "trainer_cli.addons.stores.copies:open_copies",
        # Whatever fsspec knows, and web servers.
        "storage.*": "trainer_cli.addons.stores.object_store:ObjectStorage",
    },
)
