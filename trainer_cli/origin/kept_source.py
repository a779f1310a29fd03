"""The source that made steps of a run: the files of the project, with the config and the versions.

    RUN/source/DIGEST/files/mine/parts.py     as it was imported
    RUN/source/DIGEST/config.yaml             as the run stores it, without secrets
    RUN/source/DIGEST/source.json             digests of the files, versions, what was not kept, and a code

One folder for each digest, written once; an attempt in `summary.json` names its own. Kept source is code: the code in
`source.json` is made with a key of the user, so that what somebody else wrote is told from one's own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from trainer_cli.bounds import is_bounded, is_list, is_table, is_text
from trainer_cli.errors import CheckpointError
from trainer_cli.files import parse_object, sync
from trainer_cli.origin.compare import digest_source, other_source
from trainer_cli.runs import RunDir
from trainer_cli.source_view import ROOTS_FILE
from trainer_cli.storage import replacing
from trainer_cli.user_key import is_signed, sign

FACTS_FILE = "source.json"
FILES_FOLDER = "files"
_CONFIG = "config.yaml"
_MOST_BYTES = 1 << 30
_MOST_FACTS_BYTES = 1 << 24
_DIGEST = re.compile(r"[0-9a-f]{16}")
_KINDS = {
    **dict.fromkeys(("project_root", "python", "config"), is_text),
    **dict.fromkeys(("versions", "samples", "not_kept", "files"), is_table),
    "import_roots": is_list,
}
"""Values of `source.json`, with their checks."""


class DamagedSourceError(CheckpointError):
    """A kept source is not what was written, or names files outside of its folder."""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What `source.json` says of a kept source, besides its files."""

    project_root: str
    import_roots: Sequence[str]
    """Folders, relative to the project's root, from which its modules are imported: the root itself is ''."""
    python: str
    versions: Mapping[str, str | None]
    samples: Mapping[str, Mapping[str, str]]
    """Digests of a few samples of each dataset."""
    not_kept: Mapping[str, str]
    """File -> why it was not kept."""


@dataclass(frozen=True, slots=True)
class KeptSource:
    """A source with the contents of its files, which are those that were written."""

    folder: Path
    facts: SourceFacts
    files: Mapping[str, bytes]
    """Path, relative to the project's root, with `/` -> content."""
    config: str
    is_own: bool
    """Whether a run of this user kept it."""

    @property
    def digest(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def root(self) -> Path:
        """The folder of its files, as that of the project."""
        return self.files_in(self.folder)

    @staticmethod
    def files_in(folder: Path) -> Path:
        """`root` of the source that is kept in a folder."""
        return folder / FILES_FOLDER

    @classmethod
    def of_attempt(cls, run: RunDir, attempt: int) -> KeptSource | None:
        """The source of an attempt; None if none was kept, or it was removed.

        Raises:
            DamagedSourceError: see `read`.
        """
        digest = next((entry.get("source") for entry in run.attempts if entry.get("attempt") == attempt), None)
        # The name is part of a path: a summary may come from anybody.
        if digest is None or not _DIGEST.fullmatch(digest):
            return None
        folder = run.source_folder / digest
        return cls.read(folder) if folder.exists() else None

    @classmethod
    def read(cls, folder: Path) -> KeptSource:
        """Read a kept source, and verify the digest of each file.

        Raises:
            DamagedSourceError: it is incomplete, was changed, or would write outside of a view.
        """
        content = parse_object(_read_plain(folder, FACTS_FILE, _MOST_FACTS_BYTES))
        if content is None or not is_bounded(content):
            raise _damaged(folder, f"{FACTS_FILE} is no JSON of a source")
        has_kinds = all(is_kind(content.get(name)) for name, is_kind in _KINDS.items())
        if not has_kinds or not all(map(is_text, content["import_roots"])):
            raise _damaged(folder, f"{FACTS_FILE} lacks values, or has others")
        facts = SourceFacts(**{name: content[name] for name in SourceFacts.__slots__})
        for path in (*content["files"], *filter(None, facts.import_roots)):
            if not _is_inside(path):
                raise _damaged(folder, f"{path!r} leads out of the project")
        files, left = {}, _MOST_BYTES
        for path, digest in content["files"].items():
            files[path] = _read_verified(folder, f"{FILES_FOLDER}/{path}", digest, left)
            left -= len(files[path])
        mac = content.pop("mac", None)
        config = _read_verified(folder, _CONFIG, content["config"], left).decode(errors="replace")
        return cls(folder, facts, files, config, is_signed(content, mac))

    @classmethod
    def write(
        cls,
        run: RunDir,
        facts: SourceFacts,
        files: Mapping[str, bytes],
        config: str,
        values: object,
        *,
        begins: bool = False,
    ) -> str:
        """Keep a source, durably, unless the run has it; returns its digest.

        Args:
            config: its text, without secrets.
            values: of the config, as far as another value is another source.
            begins: whether no step of an earlier attempt is left, so that the config is the one that makes step 1.
        """
        digests = {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items())}
        identity = json.dumps([values, digests, facts.samples], sort_keys=True, default=str)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        folder = run.source_folder / digest
        if (folder / FACTS_FILE).is_file() and not (begins and (folder / _CONFIG).read_bytes() != config.encode()):
            # A process that was killed after the rename has left its empty folder.
            for left in run.source_folder.glob(f".{digest}.*"):
                with suppress(OSError):
                    left.rmdir()
            return digest
        content = {
            **asdict(facts),
            "total_bytes": sum(map(len, files.values())),
            "config": hashlib.sha256(config.encode()).hexdigest(),
            "files": digests,
        }
        text = json.dumps({**content, "mac": sign(content)}, indent=2)
        written = {f"{FILES_FOLDER}/{path}": data for path, data in files.items()}
        # It is synced after all was written: one commit of a journal covers the files.
        with replacing(folder, overwrite=True) as staging:
            for path, data in {**written, _CONFIG: config.encode(), FACTS_FILE: text.encode()}.items():
                (staging / path).parent.mkdir(parents=True, exist_ok=True)
                (staging / path).write_bytes(data)
        sync(run.path)
        return digest

    def find_differences(self, root: Path) -> dict[str, str]:
        """Its files that differ in a project -> `changed` or `not there`."""
        return other_source({path: digest_source(content) for path, content in self.files.items()}, root)

    def write_view(self, view: Path, project: Path, *, with_others: bool = False) -> None:
        """Write its files into an empty folder, with links to the other entries of the project.

        Args:
            with_others: also to Python files that were not kept.
        """
        folders = {str(parent) for path in self.files for parent in PurePosixPath(path).parents}
        for folder in sorted(folders):
            (view / folder).mkdir(exist_ok=True)
            for name in list_names(project / folder):
                path = os.path.normpath(f"{folder}/{name}")
                # What git ignores is only there.
                is_code = (name.endswith((".py", ".pyc")) or name == "__pycache__") and path not in self.facts.not_kept
                # A link to a folder that has kept files would lead to those of the project.
                if (with_others or not is_code) and path not in folders:
                    os.symlink(f"{project}/{path}", f"{view}/{path}")
        for path, content in self.files.items():
            # A file without the ending of Python may be linked already.
            (view / path).unlink(missing_ok=True)
            (view / path).write_bytes(content)
        (view / ROOTS_FILE).write_text("\n".join(self.facts.import_roots), "utf-8")


def list_names(folder: Path) -> list[str]:
    """The names in a folder, of which there may be very many; none if it cannot be listed."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_inside(path: str) -> bool:
    """Whether a path of `source.json` leads to a place in the folder on every system."""
    parts = path.split("/")
    return not any(part in ("", ".", "..") for part in parts) and "\0" not in path


def _read_verified(folder: Path, path: str, digest: str, most_bytes: int) -> bytes:
    content = _read_plain(folder, path, most_bytes)
    if hashlib.sha256(content).hexdigest() != digest:
        raise _damaged(folder, f"{path} is not what was kept")
    return content


def _read_plain(folder: Path, path: str, most_bytes: int) -> bytes:
    """The content of a file in a kept source, which no link leads to."""
    file = folder / path
    try:
        if file.resolve() != folder.resolve() / path or not file.is_file():
            raise _damaged(folder, f"{path} is a link, or no file")
        with open(file, "rb") as opened:
            content = opened.read(most_bytes + 1)
    except (OSError, RuntimeError) as error:
        raise _damaged(folder, f"{path} cannot be read: {error}") from None
    if len(content) > most_bytes:
        raise _damaged(folder, f"{path} is too large")
    return content


def _damaged(folder: Path, why: str) -> DamagedSourceError:
    return DamagedSourceError(f"the source kept in {folder} is damaged: {why}")
