"""What the add-on `formats` brings."""

from __future__ import annotations

from trainer_cli.addon import AddOn

ADDON = AddOn(
    parts={
        "checkpoint.extract_archive": "trainer_cli.addons.formats.extract:extract_archive",
        "checkpoint.is_archive": "trainer_cli.addons.formats.extract:is_archive",
        "checkpoint.read_foreign": "trainer_cli.addons.formats.read:read_foreign",
        "checkpoint.read_rank": "trainer_cli.addons.formats.torch_checkpointer:read_rank",
        "ckpt.actions": "trainer_cli.addons.formats.ckpt_export:ACTIONS",
        "format.torch_file": "trainer_cli.addons.formats.torch_file:TorchFileFormat",
        "format.archive": "trainer_cli.addons.formats.archive:ArchiveFormat",
        "format.huggingface": "trainer_cli.addons.formats.huggingface:HuggingFaceFormat",
    },
)
