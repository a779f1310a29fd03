"""The manifest of a checkpoint: what it is, which files belong to it, and proof that nothing was altered."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

import xxhash

from trainer_cli.checkpoint.naming import MANIFEST_FILE, PINNED_FILE, is_plain
from trainer_cli.checkpoint.policy import Kind
from trainer_cli.config.schema import DigestAlgorithm
from trainer_cli.errors import CheckpointError

SCHEMA_VERSION = 1
_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
_LARGEST = 2**63


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is partial, or not what was written."""


class ManifestError(DamagedCheckpoint):
    """These bytes are no manifest, or not the one that was written."""


class Digest(Protocol):
    """A digest in the making."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_digest(algorithm: str) -> Digest:
    """A fresh digest of an algorithm named in a manifest."""
    return xxhash.xxh3_128() if algorithm == DigestAlgorithm.xxh3_128 else hashlib.new(algorithm)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and digest of one file; the digest names its algorithm, as `xxh3_128:…`."""

    size_bytes: int
    digest: str

    @property
    def algorithm(self) -> str:
        """The digest's algorithm."""
        return self.digest.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a checkpoint says of itself."""

    run_id: str
    attempt: int
    step: int
    epoch: int
    kind: Kind
    reason: str
    """Why it was saved: a sentence."""
    finished: str | None = None
    """How the run ended, where this is its end."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measured at exactly this step."""
    finite: bool = True
    """False where a trained parameter holds NaN or infinity."""
    world_size: int = 1
    config_digest: str | None = None
    target_packages: tuple[str, ...] = ()
    """Top-level packages that the config's targets come from."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library versions."""
    format: str = "tensors"
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every file that belongs to the checkpoint, but this one."""
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each tensor file: names of tied tensors, and the name under which each is stored."""
    progress: Mapping[str, int | float] = field(default_factory=dict)
    """All that was counted up to this step, by the names of `Progress`; empty where nothing was said."""

    def to_bytes(self) -> bytes:
        """The one way to write it, its own digest included."""
        fields = self._fields()
        return _rendered({**fields, "digest": _self_digest(fields)})

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read a manifest. Whatever differs from what `to_bytes` wrote, by a bit, is refused.

        Raises:
            ManifestError: saying why.
        """
        raw = _decoded(data)
        version = raw.get("schema_version")
        if type(version) is int and version > SCHEMA_VERSION:
            raise ManifestError(
                f"the manifest has schema version {version}, but this program knows {SCHEMA_VERSION} at most",
                cure="Use a newer version of trainer-cli.",
            )
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ManifestError(f"the manifest's schema version is {str(version)[:40]!r}, which does not exist")
        digest = raw.pop("digest", None)
        try:
            altered = digest != _self_digest(raw) or _rendered({**raw, "digest": digest}) != data
        except (ValueError, RecursionError) as error:
            raise _not_json(error) from None
        if altered:
            raise ManifestError("the manifest was altered: its own digest does not fit")
        return _read(raw)

    def _fields(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "step": self.step,
            "epoch": self.epoch,
            "kind": self.kind.value,
            "reason": self.reason,
            "finished": self.finished,
            "metrics": {name: _number(value) for name, value in self.metrics.items()},
            "finite": self.finite,
            "world_size": self.world_size,
            "config_digest": self.config_digest,
            "target_packages": list(self.target_packages),
            "versions": dict(self.versions),
            "format": self.format,
            "files": {n: {"size_bytes": e.size_bytes, "digest": e.digest} for n, e in self.files.items()},
            "aliases": {file: dict(table) for file, table in self.aliases.items()},
            "progress": dict(self.progress),
        }


def _rendered(fields: Mapping[str, Any]) -> bytes:
    return _pretty(fields, "\n").encode("ascii") + b"\n"


def _pretty(value: Any, line: str) -> str:
    """What `json.dumps(value, indent=1, sort_keys=True)` writes, in a tenth of its time: every reading checks it."""
    kind = type(value)
    if kind is str:
        return encode_basestring_ascii(value)
    if kind is int or kind is float:
        return repr(value)
    if kind is bool or value is None:
        return "null" if value is None else "true" if value else "false"
    inner = f"{line} "
    if isinstance(value, dict) and value:
        parts = [f"{encode_basestring_ascii(key)}: {_pretty(value[key], inner)}" for key in sorted(value)]
        return f"{{{inner}{f',{inner}'.join(parts)}{line}}}"
    if isinstance(value, list) and value:
        return f"[{inner}{f',{inner}'.join([_pretty(one, inner) for one in value])}{line}]"
    return _COMPACT.encode(value)


def _self_digest(fields: Mapping[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(_COMPACT.encode(fields).encode("ascii")).hexdigest()


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity: these are written as words."""
    return float(value) if math.isfinite(value) else str(float(value))


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


# One of each for all manifests: making them anew takes longer than a manifest.
_DECODER = json.JSONDecoder(parse_constant=_refuse)
_COMPACT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        raw = _DECODER.decode(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None
    if not isinstance(raw, dict):
        raise ManifestError("the manifest is not a JSON object")
    return raw


def _not_json(error: Exception) -> ManifestError:
    return ManifestError(f"the manifest is not JSON: {str(error)[:120]}")


def _read(raw: dict[str, Any]) -> Manifest:
    wrong = set(raw).symmetric_difference(_NAMES) - (_LATER - set(raw))
    if wrong:
        raise ManifestError(f"the manifest lacks, or does not know: {', '.join(sorted(wrong))[:200]}")
    kind = _text(raw, "kind")
    if kind not in set(Kind):
        raise ManifestError(f"the manifest's kind is {kind[:40]!r}, but it is one of {', '.join(Kind)}")
    if type(raw["finite"]) is not bool:
        raise ManifestError("the manifest's finite is not true or false")
    packages = raw["target_packages"]
    if not isinstance(packages, list) or not all(isinstance(one, str) for one in packages):
        raise ManifestError("the manifest's target_packages is not a list of names")
    files = {name: _file_entry(name, entry) for name, entry in _mapping(raw, "files").items()}
    return Manifest(
        run_id=_text(raw, "run_id"),
        attempt=_count(raw, "attempt"),
        step=_count(raw, "step"),
        epoch=_count(raw, "epoch"),
        kind=Kind(kind),
        reason=_text(raw, "reason"),
        finished=_optional_text(raw, "finished"),
        metrics={name: _measured(name, value) for name, value in _mapping(raw, "metrics").items()},
        finite=raw["finite"],
        world_size=_count(raw, "world_size", least=1),
        config_digest=_optional_text(raw, "config_digest"),
        target_packages=tuple(packages),
        versions=_texts(_mapping(raw, "versions"), "versions"),
        format=_text(raw, "format"),
        files=files,
        aliases={name: _aliases(name, table, files) for name, table in _mapping(raw, "aliases").items()},
        progress={name: _counted(name, value) for name, value in _mapping(raw, "progress").items()}
        if "progress" in raw
        else {},
    )


# What the first manifests did not have.
_LATER = frozenset({"progress"})
_NAMES = frozenset(Manifest(run_id="", attempt=0, step=0, epoch=0, kind=Kind.permanent, reason="")._fields())


def _text(raw: Mapping[str, Any], key: str) -> str:
    if not isinstance(raw[key], str):
        raise ManifestError(f"the manifest's {key} is not a text")
    return str(raw[key])


def _optional_text(raw: Mapping[str, Any], key: str) -> str | None:
    return None if raw[key] is None else _text(raw, key)


def _count(raw: Mapping[str, Any], key: str, least: int = 0) -> int:
    value = raw[key]
    if type(value) is not int or not least <= value < _LARGEST:
        raise ManifestError(f"the manifest's {key} is not a number of at least {least}")
    return value


def _mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(raw[key], dict):
        raise ManifestError(f"the manifest's {key} is not a mapping")
    return dict(raw[key])


def _texts(raw: Mapping[str, Any], key: str) -> dict[str, str]:
    if not all(isinstance(value, str) for value in raw.values()):
        raise ManifestError(f"the manifest's {key} does not map names to texts")
    return dict(raw)


def _measured(name: str, value: object) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    if type(value) is not float and type(value) is not int:
        raise ManifestError(f"the manifest's metric {name[:80]!r} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise ManifestError(f"the manifest's metric {name[:80]!r} is out of range") from None


def _counted(name: str, value: object) -> int | float:
    if type(value) not in (int, float) or not -1 <= value < _LARGEST:  # type: ignore[operator]
        raise ManifestError(f"the manifest's progress {name[:80]!r} is not a count")
    return value  # type: ignore[return-value]


def _file_entry(name: str, entry: object) -> FileEntry:
    if not is_plain(name) or name in (MANIFEST_FILE, PINNED_FILE):
        raise ManifestError(f"the manifest names {name[:80]!r}, which cannot be a file of a checkpoint")
    if not isinstance(entry, dict) or set(entry) != {"size_bytes", "digest"}:
        raise ManifestError(f"the manifest's entry of {name} is not a size and a digest")
    if not isinstance(entry["digest"], str) or not _DIGEST.fullmatch(entry["digest"]):
        raise ManifestError(f"the manifest's digest of {name} is not one that we know")
    return FileEntry(_count(entry, "size_bytes"), entry["digest"])


def _aliases(name: str, table: object, files: Mapping[str, FileEntry]) -> dict[str, str]:
    if name not in files or not isinstance(table, dict):
        raise ManifestError(f"the manifest's aliases of {name[:80]!r} are not a table of one of its files")
    return _texts(table, "aliases")
