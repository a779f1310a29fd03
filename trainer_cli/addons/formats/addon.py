"""What the add-on `formats` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(
    parts={
        "format.torch_file": "trainer_cli.addons.formats.torch_file:TorchFileFormat",
        "format.archive": "trainer_cli.addons.formats.archive:ArchiveFormat",
        "format.huggingface": "trainer_cli.addons.formats.huggingface:HuggingFaceFormat",
    },
)
