"""The manifest of a checkpoint: what it is, its files with their digests, and a digest of itself."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from trainer_cli.bounds import is_text
from trainer_cli.errors import CheckpointError, UserError, one_line
from trainer_cli.layout import MANIFEST_FILE, PINNED_FILE, PartTable, Shard, is_plain
from trainer_cli.policy import CheckpointKind
from trainer_cli.schema import DigestAlgorithm

SCHEMA_VERSION = 2
"""Version 1 has its own digest among the other fields, and over their values instead of over bytes."""
FROZEN_SUFFIX = ".frozen.safetensors"
"""Ending of the names of tensor files that checkpoints of a run may share, as hard links."""
_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
# Larger counts fit no 64-bit integer, so none was ever counted; a hostile file may hold any.
_MAX_COUNT = 2**63


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is partial, or not what was written."""

    @classmethod
    def of_file(cls, path: object, why: str) -> DamagedCheckpoint:
        """The error that names a file of a checkpoint."""
        return cls(f"a file of the checkpoint is damaged: {why}", where=str(path))

    @classmethod
    def from_error(cls, error: Exception, where: object) -> DamagedCheckpoint:
        """What reading a checkpoint raised, as damage: its content is not what a save writes."""
        return cls(f"it cannot be read: {type(error).__name__}: {str(error)[:200]}", where=str(where))


class UnrecoverableCheckpoint(DamagedCheckpoint, ValueError):
    """A checkpoint is damaged, raised by functions whose refusals are all a ValueError."""


class ManifestError(DamagedCheckpoint):
    """These bytes are no manifest, or were altered."""


class UnsavableState(UserError):
    """The state has a value of a type that a checkpoint cannot contain."""


class Digest(Protocol):
    """A digest being computed."""

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
    """The facts about a checkpoint, without reading its other files."""

    run_id: str
    attempt: int
    step: int
    epoch: int
    kind: CheckpointKind
    reason: str
    """Why it was saved: a sentence."""
    name: str | None = None
    """The name of its folder; under another name it is a copy that a user made. None in old manifests."""
    finished: str | None = None
    """How the run ended, if this is its final checkpoint."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measured at exactly this step."""
    average: str | None = None
    """Name of the callback whose average of the weights was evaluated in their place; None: the weights themselves.
    `train/` metrics are always of the weights. Not written if None."""
    left_out: tuple[str, ...] = ()
    """States of the training that it lacks by `checkpoint.leave_out`. Not written if empty."""
    finite: bool = True
    """False if a trained parameter holds NaN or infinity."""
    world_size: int = 1
    tensor_size: int = 1
    """Ranks in a row that had the same samples, and divided layers between them. Not written if it is 1."""
    config_digest: str | None = None
    target_packages: tuple[str, ...] = ()
    """Top-level packages that the config's targets come from."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library versions."""
    format: str = "tensors"
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Every file of the checkpoint except the manifest."""
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each tensor file: names of tied tensors, and the name under which each is stored."""
    shards: Mapping[str, Mapping[str, Shard]] = field(default_factory=dict)
    """Tensor file -> tensor -> the part of it in this file, for tensors that ranks share; a `PartTable`. Not written if
    empty, as when one process saved."""
    progress: Mapping[str, int | float] = field(default_factory=dict)
    """The counts at this step, by the names of `Progress`; empty if unknown."""
    samples: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Digests of a few samples by their index, for each dataset (`data/digest.py`). Not written if empty."""
    source: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files of the project that the run had imported, by their paths in it. Not written if empty."""
    number: int | None = None
    """Which of the run's checkpoints it is, counted from 1 while `checkpoint.copy_to` is set; that of step 0 has none.
    Not written if None."""
    saved_by: str | None = None
    """The launch and the rank of a process that saved alone, although there were others. Not written if None."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", PartTable.of(self.shards))

    def to_bytes(self) -> bytes:
        """The manifest as JSON, with its own digest."""
        return _add_digest(self._fields())

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read a manifest, also of an earlier version. Anything that differs by a bit from what was written is refused.

        Raises:
            ManifestError: saying why.
        """
        raw = _decode(data)
        version = raw.get("schema_version")
        # The version is checked before the digest, which a newer version may compute otherwise.
        if type(version) is int and version > SCHEMA_VERSION:
            raise ManifestError(
                f"the manifest has schema version {version}, but this program knows {SCHEMA_VERSION} at most",
                cure="Use a newer version of trainer-cli.",
            )
        if type(version) is not int or version < 1:
            raise ManifestError(f"the manifest's schema version is {str(version)[:40]!r}, which does not exist")
        digest = raw.pop("digest", None)
        is_intact = _is_intact_version_1(raw, digest, data) if version == 1 else _is_intact(data, digest)
        if not is_intact:
            raise ManifestError("the manifest was altered: its own digest does not fit")
        return _make_manifest(raw)

    def _fields(self) -> dict[str, Any]:
        """The values for JSON, without the digest."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "step": self.step,
            "epoch": self.epoch,
            "kind": self.kind.on_disk,
            "reason": self.reason,
            "finished": self.finished,
            "metrics": {name: _to_json_number(value) for name, value in self.metrics.items()},
            "finite": self.finite,
            "world_size": self.world_size,
            "config_digest": self.config_digest,
            "target_packages": list(self.target_packages),
            "versions": dict(self.versions),
            "format": self.format,
            "files": {
                name: {"size_bytes": entry.size_bytes, "digest": entry.digest} for name, entry in self.files.items()
            },
            "aliases": {file: dict(table) for file, table in self.aliases.items()},
            "progress": dict(self.progress),
            # Written only where needed, so that manifests without them stay readable by older versions.
            **({} if self.name is None else {"name": self.name}),
            **({"parts": PartTable.of(self.shards).to_json()} if self.shards else {}),
            **({"tensor_size": self.tensor_size} if self.tensor_size > 1 else {}),
            **({"average": self.average} if self.average is not None else {}),
            **({"left_out": list(self.left_out)} if self.left_out else {}),
            **({"samples": {name: dict(table) for name, table in self.samples.items()}} if self.samples else {}),
            **({"source": dict(self.source)} if self.source else {}),
            **({} if self.number is None else {"number": self.number}),
            **({} if self.saved_by is None else {"saved_by": self.saved_by}),
        }


def _add_digest(fields: Mapping[str, Any]) -> bytes:
    """The JSON of a manifest, which ends in the digest of all bytes before it."""
    # Keys are sorted, so that equal manifests have equal bytes.
    content = json.dumps(fields, indent=1, sort_keys=True, allow_nan=False).removesuffix("\n}").encode("ascii")
    return content + _digest_line(_digest_of(content))


def _digest_of(content: bytes) -> str:
    """The digest of the manifest's own bytes."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _digest_line(digest: object) -> bytes:
    """The end of a manifest: the line with its digest, and the closing brace."""
    return f',\n "digest": "{digest}"\n}}\n'.encode("ascii", errors="replace")


def _is_intact(data: bytes, digest: object) -> bool:
    """Whether a manifest ends with the digest of all bytes before it."""
    end = _digest_line(digest)
    return data.endswith(end) and digest == _digest_of(data[: -len(end)])


def _is_intact_version_1(raw: Mapping[str, Any], digest: object, data: bytes) -> bool:
    """Whether a manifest of version 1 has the digest of its values, and the spelling that was written."""
    try:
        # Sorted and without spaces, so that the digest does not depend on the order of insertion or on layout.
        values = json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
        # Written again and compared byte by byte: JSON has many spellings of one value, and the digest covers values.
        spelling = json.dumps({**raw, "digest": digest}, indent=1, sort_keys=True).encode("ascii") + b"\n"
    except (ValueError, RecursionError) as error:
        raise _not_json_error(error) from None
    return digest == _digest_of(values) and spelling == data


def _to_json_number(value: float) -> float | str:
    """A number for JSON, which has no NaN and no infinity: these are written as words."""
    return float(value) if math.isfinite(value) else str(float(value))


def _refuse(word: str) -> None:
    """Raise ValueError for NaN and Infinity, which Python's parser would accept."""
    raise ValueError(f"{word} is not JSON")


# Made once, as there may be thousands of manifests.
_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _decode(data: bytes) -> dict[str, Any]:
    """The values of a manifest's JSON.

    Raises:
        ManifestError: it is not an object of JSON.
    """
    try:
        # As ascii: `to_bytes` escapes all other characters, so other bytes are not what was written.
        raw = _DECODER.decode(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise _not_json_error(error) from None
    if not isinstance(raw, dict):
        raise ManifestError("the manifest is not a JSON object")
    return raw


def _not_json_error(error: Exception) -> ManifestError:
    """The error for a manifest that cannot be parsed."""
    return ManifestError(f"the manifest is not JSON: {str(error)[:120]}")


def _make_manifest(raw: dict[str, Any]) -> Manifest:
    """Check the values of a manifest, of this or an earlier version, and make it.

    Raises:
        ManifestError: a field is missing, unknown or of another kind, or names a file that is not listed.
    """
    # Old manifests lack progress, name, samples and source, and have `shards` for `parts`. Fields at their default are
    # not written.
    absent: dict[str, Any] = {"progress": {}, "name": None, "samples": {}, "source": {}}
    raw = {
        **absent,
        "shards": {},
        "parts": {"files": {}, "names": []},
        "tensor_size": 1,
        "average": None,
        "left_out": [],
        "number": None,
        "saved_by": None,
        **raw,
    }
    if misfits := set(raw).symmetric_difference(_FIELDS) - {"schema_version"}:
        raise ManifestError(f"the manifest lacks, or does not know: {one_line(', '.join(sorted(misfits))[:200])}")
    for name, allowed in _FIELDS.items():
        if not allowed(raw[name]):
            raise ManifestError(f"the manifest's {name} cannot be {one_line(str(raw[name])[:200])}")
    for name, files in (("aliases", raw["aliases"]), ("shards", raw["shards"]), ("parts", raw["parts"]["files"])):
        if unknown := set(files) - set(raw["files"]):
            raise ManifestError(f"the manifest has {name} of {min(unknown)[:80]!r}, which is not one of its files")
    try:
        shards: Mapping[str, Mapping[str, Shard]] = PartTable.from_json(raw["parts"])
        if raw["shards"]:
            shards = {
                file: {name: Shard.parse(text) for name, text in tensors.items()}
                for file, tensors in raw["shards"].items()
            }
    except ValueError as error:
        raise ManifestError(f"the manifest's shards cannot be read: {one_line(str(error))}") from None
    return Manifest(
        **{name: raw[name] for name in _FIELDS if name not in _CONVERTED},
        kind=_KINDS[raw["kind"]],
        metrics={name: float(value) for name, value in raw["metrics"].items()},
        target_packages=tuple(raw["target_packages"]),
        left_out=tuple(raw["left_out"]),
        files={name: FileEntry(**entry) for name, entry in raw["files"].items()},
        shards=shards,
    )


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_optional_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: object) -> bool:
    """Whether a value is a whole number that can be a count."""
    # isinstance would take True, which is an int.
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_json_number(value: object) -> bool:
    """Whether a value is what `_to_json_number` writes."""
    if type(value) is int:
        # float() of a longer one overflows.
        return abs(value) < _MAX_COUNT
    return type(value) is float or value in ("nan", "inf", "-inf")


def _is_progress_count(value: object) -> bool:
    """Whether a value is one of the counts of `Progress`; -1 is the `evaluated_step` before any evaluation."""
    # isinstance would take True, which is an int.
    return (type(value) is int or type(value) is float) and -1 <= value < _MAX_COUNT


def _is_file(name: str, entry: object) -> bool:
    """Whether a name and the values of a `FileEntry` can be those of a file of a checkpoint."""
    if not is_plain(name) or name in (MANIFEST_FILE, PINNED_FILE):
        return False
    if not isinstance(entry, dict) or set(entry) != {"size_bytes", "digest"}:
        return False
    size_bytes, digest = entry["size_bytes"], entry["digest"]
    # fullmatch: `match` with `$` accepts a newline at the end.
    return _is_count(size_bytes) and isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None


def _is_table_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_text, value.values()))


def _maps_to(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check for a mapping whose values pass another check."""
    return lambda value: isinstance(value, dict) and all(map(allowed, value.values()))


_KINDS = {kind.on_disk: kind for kind in CheckpointKind}
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "run_id": is_text,
    "attempt": _is_count,
    "step": _is_count,
    "epoch": _is_count,
    "kind": lambda value: value in _KINDS,
    "reason": is_text,
    "name": lambda value: value is None or (isinstance(value, str) and is_plain(value)),
    "finished": _is_optional_text,
    "metrics": _maps_to(_is_json_number),
    "finite": lambda value: type(value) is bool,
    "world_size": lambda value: _is_count(value) and value > 0,
    "tensor_size": lambda value: _is_count(value) and value > 0,
    "average": _is_optional_text,
    "config_digest": _is_optional_text,
    "target_packages": _is_list_of_texts,
    "left_out": _is_list_of_texts,
    "versions": _is_table_of_texts,
    "format": is_text,
    "files": lambda value: isinstance(value, dict) and all(_is_file(*item) for item in value.items()),
    "aliases": _maps_to(_is_table_of_texts),
    "shards": _maps_to(_is_table_of_texts),
    "parts": lambda value: (
        _maps_to(lambda item: isinstance(item, list | dict))(value)
        and set(value) == {"files", "names"}
        and isinstance(value["names"], list)
        and _maps_to(lambda item: isinstance(item, dict))(value["files"])
    ),
    "progress": _maps_to(_is_progress_count),
    "samples": _maps_to(_is_table_of_texts),
    "source": _is_table_of_texts,
    "number": lambda value: value is None or _is_count(value),
    "saved_by": _is_optional_text,
}
"""Field of a manifest -> check of its value."""
_CONVERTED = ("kind", "metrics", "target_packages", "left_out", "files", "shards", "parts")
"""Fields whose values in JSON are of another type than those of the dataclass."""
