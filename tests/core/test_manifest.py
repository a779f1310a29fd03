"""The manifest: exact there and back, and nothing altered passes."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainer_cli.layout.shards import Shard
from trainer_cli.manifest import FileEntry, Manifest, ManifestError, new_digest
from trainer_cli.policy.rules import CheckpointKind

DIGEST = "xxh3_128:" + "0" * 32
SAMPLE = Manifest(
    run_id="run1",
    attempt=2,
    step=500,
    epoch=3,
    kind=CheckpointKind.ephemeral,
    reason="every 250 steps — später",
    finished="max_duration",
    metrics={"val/loss": 0.25, "val/nan": math.inf, "x": -math.inf, "y": 1e-300},
    finite=False,
    world_size=2,
    config_digest="sha256:abc",
    target_packages=("trainer_cli", "mine"),
    versions={"torch": "2.13.0"},
    files={"rank0.safetensors": FileEntry(4096, DIGEST), "config.yaml": FileEntry(0, "sha256:" + "a" * 64)},
    aliases={"rank0.safetensors": {"model/head": "model/wte"}},
)


def sealed(fields: dict[str, object]) -> bytes:
    """A manifest of these fields with a fitting digest of itself, by its version."""
    if fields.get("schema_version") == 1:
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
        fields = {**fields, "digest": "sha256:" + hashlib.sha256(canonical).hexdigest()}
        return json.dumps(fields, indent=1, sort_keys=True).encode("ascii") + b"\n"
    content = json.dumps(fields, indent=1, sort_keys=True)[: -len("\n}")]
    return f'{content},\n "digest": "sha256:{hashlib.sha256(content.encode()).hexdigest()}"\n}}\n'.encode("ascii")


def forged(**changes: object) -> bytes:
    """A manifest with changed fields and a fitting digest of itself: what a hostile hand would write."""
    fields = json.loads(SAMPLE.to_bytes())
    del fields["digest"]
    for key, value in changes.items():
        if value is ...:
            del fields[key]
        else:
            fields[key] = value
    return sealed(fields)


VERSIONS = [pytest.param(SAMPLE.to_bytes(), id="2"), pytest.param(forged(schema_version=1), id="1")]


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.parse(SAMPLE.to_bytes()) == SAMPLE
    assert forged() == SAMPLE.to_bytes()


def test_a_manifest_of_version_1_is_read_and_written_again_in_the_present_version() -> None:
    old = Manifest.parse(forged(schema_version=1))
    assert old == SAMPLE
    assert old.to_bytes() == SAMPLE.to_bytes()


@pytest.mark.parametrize("version", [1, 2])
def test_the_digest_of_one_version_is_none_of_the_other(version: int) -> None:
    data = forged(schema_version=version)
    other = data.replace(b'"schema_version": %d' % version, b'"schema_version": %d' % (3 - version))
    with pytest.raises(ManifestError, match="altered"):
        Manifest.parse(other)


def test_nan_comes_back_as_nan() -> None:
    manifest = Manifest(
        run_id="", attempt=0, step=0, epoch=0, kind=CheckpointKind.regular, reason="", metrics={"a": math.nan}
    )
    assert math.isnan(Manifest.parse(manifest.to_bytes()).metrics["a"])


@pytest.mark.parametrize("data", VERSIONS)
def test_every_flipped_bit_is_found(data: bytes) -> None:
    for place in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            with pytest.raises(ManifestError):
                Manifest.parse(bytes(altered))


@pytest.mark.parametrize("data", VERSIONS)
def test_every_truncation_is_found(data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(ManifestError):
            Manifest.parse(data[:length])


@pytest.mark.parametrize("more", [b"\n", b" ", b"\0", b"{}", b"x", b"\xff"])
def test_appended_bytes_are_found(more: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(SAMPLE.to_bytes() + more)


@pytest.mark.parametrize("data", VERSIONS)
@pytest.mark.parametrize("indent", [None, 2])
def test_another_layout_of_the_same_json_is_found(data: bytes, indent: int | None) -> None:
    with pytest.raises(ManifestError, match="altered"):
        Manifest.parse(json.dumps(json.loads(data), indent=indent).encode())


def test_a_newer_schema_says_that_a_newer_program_is_needed() -> None:
    with pytest.raises(ManifestError, match="newer version"):
        Manifest.parse(forged(schema_version=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 0}, "schema version"),
        ({"schema_version": True}, "schema version|altered"),
        ({"schema_version": "2"}, "schema version"),
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"step": True}, "step"),
        ({"step": 2**63}, "step"),
        ({"step": "5"}, "step"),
        ({"world_size": 0}, "world_size"),
        ({"kind": "eternal"}, "kind"),
        ({"kind": None}, "kind"),
        ({"finite": 1}, "finite"),
        ({"finished": 3}, "finished"),
        ({"metrics": []}, "metrics"),
        ({"metrics": {"a": "many"}}, "metric"),
        ({"metrics": {"a": 10**400}}, "metric"),
        ({"target_packages": "os"}, "target_packages"),
        ({"target_packages": [1]}, "target_packages"),
        ({"versions": {"torch": 2}}, "versions"),
        ({"files": {"../evil": {"size_bytes": 1, "digest": DIGEST}}}, "evil"),
        ({"files": {"/etc/passwd": {"size_bytes": 1, "digest": DIGEST}}}, "passwd"),
        ({"files": {".hidden": {"size_bytes": 1, "digest": DIGEST}}}, "hidden"),
        ({"files": {"..": {"size_bytes": 1, "digest": DIGEST}}}, r"\.\."),
        ({"files": {"": {"size_bytes": 1, "digest": DIGEST}}}, "file"),
        ({"files": {"manifest.json": {"size_bytes": 1, "digest": DIGEST}}}, "manifest.json"),
        ({"files": {"a": {"size_bytes": -1, "digest": DIGEST}}}, "size"),
        ({"files": {"a": {"size_bytes": 1, "digest": "md5:00"}}}, "digest"),
        ({"files": {"a": {"size_bytes": 1, "digest": DIGEST + "\n"}}}, "digest"),
        ({"files": {"a": {"size_bytes": 1, "digest": None}}}, "digest"),
        ({"files": {"a": {"size_bytes": 1}}}, "size"),
        ({"files": {"a": [1, DIGEST]}}, "files"),
        ({"aliases": {"nowhere": {"a": "b"}}}, "aliases"),
        ({"aliases": {"config.yaml": {"a": 1}}}, "aliases"),
        ({"aliases": {"config.yaml": [1]}}, "aliases"),
        ({"step": ...}, "step"),
        ({"more": 1}, "more"),
    ],
)
def test_hostile_manifests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.parse(forged(**changes))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b'{"digest": NaN}', b"1" * 5000],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(data)


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_give_a_manifest_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(data)


@pytest.mark.parametrize(
    ("algorithm", "hexdigest"),
    [
        ("xxh3_128", "06b05ab6733a618578af5f94892f3950"),
        ("sha256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    ],
)
def test_digests_are_the_published_ones(algorithm: str, hexdigest: str) -> None:
    digest = new_digest(algorithm)
    digest.update(b"abc")
    assert digest.hexdigest() == hexdigest


def test_a_manifest_without_progress_is_an_older_one_and_is_read() -> None:
    raw = json.loads(
        Manifest(run_id="r", attempt=1, step=1, epoch=0, kind=CheckpointKind.regular, reason="r").to_bytes()
    )
    del raw["progress"], raw["digest"]
    assert Manifest.parse(sealed({**raw, "schema_version": 1})).progress == {}


PARTS = {"rank0.safetensors": {"w": Shard((4,), (0,), (2,)), "v": Shard((4,), (0,), (2,)), "x": Shard.all_of(())}}


def test_parts_of_tensors_come_back_also_from_the_shards_of_version_1() -> None:
    manifest = replace(SAMPLE, shards=PARTS)
    assert Manifest.parse(manifest.to_bytes()).shards == PARTS
    texts = {file: {name: str(shard) for name, shard in parts.items()} for file, parts in PARTS.items()}
    assert Manifest.parse(forged(schema_version=1, shards=texts)) == manifest


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"files": {"nowhere": {}}, "names": []}, "parts of 'nowhere'"),
        ({"files": {"rank0.safetensors": {"[0:9] of [2]": 0}}, "names": [["w"]]}, "shards cannot be read"),
        ({"files": {"rank0.safetensors": {"[0:1] of [2]": 5}}, "names": [["w"]]}, "unknown group"),
        ({"files": {"rank0.safetensors": []}, "names": []}, "parts cannot be"),
        ({"files": [], "names": []}, "parts cannot be"),
        ({"files": {}, "names": {}}, "parts cannot be"),
        ({"files": {}}, "parts cannot be"),
        ({"files": {}, "names": [], "more": {}}, "parts cannot be"),
        ([], "parts cannot be"),
    ],
)
def test_hostile_parts_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.parse(forged(parts=parts))


def test_a_regular_checkpoint_has_the_word_of_all_versions_on_the_disk() -> None:
    manifest = Manifest(run_id="r", attempt=1, step=1, epoch=0, kind=CheckpointKind.regular, reason="r")
    assert json.loads(manifest.to_bytes())["kind"] == "permanent"
    assert Manifest.parse(manifest.to_bytes()).kind is CheckpointKind.regular
