"""A checkpoint whose digests are right and whose states cannot be loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer_cli.manifest import FileEntry, Manifest, new_digest


def make_undecodable(checkpoint: Path) -> None:
    """Replace the states by others that have the right digest, and cannot be loaded."""
    content, file = b'{"no": "states"}', checkpoint / "manifest.json"
    manifest = Manifest.parse(file.read_bytes())
    algorithm = manifest.files["rank0.json"].algorithm
    digest = new_digest(algorithm)
    digest.update(content)
    entry = FileEntry(len(content), f"{algorithm}:{digest.hexdigest()}")
    (checkpoint / "rank0.json").write_bytes(content)
    file.write_bytes(replace(manifest, files={**manifest.files, "rank0.json": entry}).to_bytes())
