"""Write a whole checkpoint as one archive, which `ckpt=` reads like the checkpoint."""

from __future__ import annotations

from pathlib import Path

from trainer_cli.addons.formats.archive_file import SUFFIX, ArchiveWriter
from trainer_cli.catalog import Catalog
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.schema import Compression
from trainer_cli.storage import replacing
from trainer_cli.tensor_files import VerifiedFile

SUFFIXES = {suffix: compression for compression, suffix in SUFFIX.items()} | {".tgz": Compression.gz}
_BLOCK = 1 << 20


def write_archive(checkpoint: Path, output: Path, *, overwrite: bool = False) -> int:
    """Write a checkpoint as one archive, whose compression follows from its name; the bytes written.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged: every digest is verified on the way.
        UserError: the name ends with none of, or exists.
    """
    ending = next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if output.name.endswith(suffix)), None)
    if ending is None:
        raise UserError(
            f"{output} ends with none of {', '.join(SUFFIXES)}", cure="Choose an --output with one of them."
        )
    catalog = Catalog.of(checkpoint.parent)
    entry = catalog.entry(checkpoint.name)
    if entry.manifest is None or entry.problem is not None:
        raise CheckpointError(f"the checkpoint is not valid: {entry.problem}", where=str(checkpoint))
    with catalog.storage.reading(checkpoint.name) as folder, replacing(output, overwrite=overwrite) as temporary:
        content = (folder.path / MANIFEST_FILE).read_bytes()
        sizes = {MANIFEST_FILE: len(content)} | {
            name: file_entry.size_bytes for name, file_entry in entry.manifest.files.items()
        }
        with temporary.open("wb") as file:
            archive = ArchiveWriter(file, SUFFIXES[ending], sizes, prefix=f"{checkpoint.name}/")
            with archive.create(MANIFEST_FILE) as member:
                member.write(content)
            for name in entry.manifest.files:
                with archive.create(name) as member, VerifiedFile(folder, entry.manifest, name) as source:
                    stream = source.stream()
                    while block := stream.read(_BLOCK):
                        member.write(block)
            archive.finish()
        return temporary.stat().st_size
