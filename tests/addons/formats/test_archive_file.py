"""A checkpoint in one archive: every ending, and nothing that is hostile in it leaves its folder or fills the disk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from states import same, small_state

from trainer_cli.addons.formats.archive_file import read_archive
from trainer_cli.addons.formats.extract import extract_archive, is_archive
from trainer_cli.addons.formats.read import read_foreign
from trainer_cli.addons.formats.whole_archive import SUFFIXES, write_archive
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.checkpoint.without_trainer import load_checkpoint
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.selection.patterns import select_one


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "run/step3"
    files = {"config.yaml": b"name: x\n"}
    make_sync_checkpointer().save(small_state(3), path, metadata=CheckpointMetadata(step=3, files=files))
    return path


@pytest.mark.parametrize("ending", SUFFIXES)
def test_an_archive_comes_back_as_the_checkpoint_whatever_it_is_called(
    checkpoint: Path, tmp_path: Path, ending: str
) -> None:
    output = tmp_path / f"out{ending}"
    assert write_archive(checkpoint, output) == output.stat().st_size
    other = output.rename(tmp_path / "plain-name")
    assert is_archive(other)
    for _ in range(2):
        extracted = extract_archive(other)
        assert extracted.name == "step3"
        assert {path.name: path.read_bytes() for path in extracted.iterdir()} == {
            path.name: path.read_bytes() for path in checkpoint.iterdir()
        }
        assert same(dict(make_sync_checkpointer().load(extracted)), small_state(3))
    assert not is_archive(checkpoint / "rank0.safetensors")


def test_two_threads_that_extract_one_archive_share_the_copy(checkpoint: Path, tmp_path: Path) -> None:
    write_archive(checkpoint, tmp_path / "out.tar")
    with ThreadPoolExecutor(4) as pool:
        copies = set(pool.map(extract_archive, [tmp_path / "out.tar"] * 8))
    assert len(copies) == 1


def test_a_damaged_checkpoint_is_not_written_to_an_archive(checkpoint: Path, tmp_path: Path) -> None:
    damaged = checkpoint / "rank0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=r"the digest differs.*rank0\.safetensors"):
        write_archive(checkpoint, tmp_path / "out.tar")
    assert not (tmp_path / "out.tar").exists()


def test_an_archive_that_was_replaced_within_its_size_and_time_is_extracted_anew(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.tar"
    write_archive(checkpoint, path)
    extract_archive(path)
    found, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"name: x", b"name: y"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CheckpointError, match="the digest differs"):
        extract_archive(path)


def test_other_endings_and_existing_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ends with none of \.tar, \.tar\.gz"):
        write_archive(checkpoint, tmp_path / "out.zip")
    write_archive(checkpoint, tmp_path / "out.tar")
    with pytest.raises(UserError, match="exists"):
        write_archive(checkpoint, tmp_path / "out.tar")


def packed(members: list[tuple[tarfile.TarInfo, bytes]], **settings: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **settings) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def member(name: str, content: bytes = b"", **settings: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in settings.items():
        setattr(info, key, value)
    return info, content


def contents(checkpoint: Path) -> dict[str, bytes]:
    names = ["manifest.json", *sorted(path.name for path in checkpoint.iterdir() if path.name != "manifest.json")]
    return {name: (checkpoint / name).read_bytes() for name in names}


def honest(files: dict[str, bytes]) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [member(f"step3/{name}", content) for name, content in files.items()]


def changed(files: dict[str, bytes], name: str, content: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    return honest({**files, name: content})


HOSTILE: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "a path above": lambda f: packed([*honest(f), member("../outside", b"x")]),
    "a path far above": lambda f: packed([*honest(f), member("step3/../../../outside", b"x")]),
    "an absolute path": lambda f: packed([*honest(f), member("/tmp/outside-trainer-cli", b"x")]),
    "a listed name above": lambda f: packed([honest(f)[0], member("../config.yaml", f["config.yaml"])]),
    "a listed name elsewhere": lambda f: packed([honest(f)[0], member("deep/er/config.yaml", f["config.yaml"])]),
    "another folder": lambda f: packed([honest(f)[0], member("step4/config.yaml", f["config.yaml"])]),
    "a manifest above": lambda f: packed([member("../manifest.json", f["manifest.json"]), *honest(f)[1:]]),
    "a manifest in ..": lambda f: packed([member("../../manifest.json", f["manifest.json"]), *honest(f)[1:]]),
    "a hidden folder": lambda f: packed([member(".x/manifest.json", f["manifest.json"]), *honest(f)[1:]]),
    "a symbolic link": lambda f: packed(
        [honest(f)[0], member("step3/config.yaml", type=tarfile.SYMTYPE, linkname="/etc/passwd")]
    ),
    "a link of the right size": lambda f: packed(
        [honest(f)[0], (_sized("step3/config.yaml", len(f["config.yaml"]), tarfile.SYMTYPE), f["config.yaml"])]
    ),
    "a hard link": lambda f: packed(
        [*honest(f)[:1], member("step3/config.yaml", type=tarfile.LNKTYPE, linkname="step3/manifest.json")]
    ),
    "a device": lambda f: packed([honest(f)[0], member("step3/config.yaml", type=tarfile.CHRTYPE)]),
    "a block device": lambda f: packed([honest(f)[0], member("step3/config.yaml", type=tarfile.BLKTYPE)]),
    "a pipe": lambda f: packed([honest(f)[0], member("step3/config.yaml", type=tarfile.FIFOTYPE)]),
    "a folder": lambda f: packed([honest(f)[0], member("step3/config.yaml", type=tarfile.DIRTYPE)]),
    "a manifest that is a link": lambda f: packed(
        [member("step3/manifest.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"), *honest(f)[1:]]
    ),
    "a file twice": lambda f: packed([*honest(f), member("step3/config.yaml", f["config.yaml"])]),
    "a manifest twice": lambda f: packed([*honest(f), member("step3/manifest.json", f["manifest.json"])]),
    "a file too many": lambda f: packed([*honest(f), member("step3/more", b"x")]),
    "pinned": lambda f: packed([*honest(f), member("step3/pinned", b"")]),
    "a file too few": lambda f: packed(honest(f)[:-1]),
    "only the manifest": lambda f: packed(honest(f)[:1]),
    "the manifest last": lambda f: packed([*honest(f)[1:], honest(f)[0]]),
    "a longer file": lambda f: packed(changed(f, "config.yaml", f["config.yaml"] + b"x")),
    "a shorter file": lambda f: packed(changed(f, "config.yaml", f["config.yaml"][:-1])),
    "another content": lambda f: packed(changed(f, "config.yaml", b"name: y\n")),
    "an altered manifest": lambda f: packed(
        changed(f, "manifest.json", f["manifest.json"].replace(b'"step": 3', b'"step": 4'))
    ),
    "a manifest that is none": lambda f: packed(changed(f, "manifest.json", b"{}")),
    "a manifest of text": lambda f: packed(changed(f, "manifest.json", b"\xff\xfe")),
    "cut in a header": lambda f: packed(honest(f))[:700],
    "cut in a file": lambda f: packed(honest(f))[:-9000],
    "a bad checksum": lambda f: b"x" + packed(honest(f))[1:],
    "nothing": lambda f: b"",
    "zeros": lambda f: bytes(10240),
    "noise": lambda f: os.urandom(4096),
    "a long name": lambda f: packed([*honest(f), member("step3/" + "x" * 5000, b"x")], format=tarfile.GNU_FORMAT),
    "a name in a header of its own": lambda f: packed(
        [honest(f)[0], member("x", f["config.yaml"], pax_headers={"path": "../outside"})], format=tarfile.PAX_FORMAT
    ),
    "a size in a header of its own": lambda f: packed(
        [honest(f)[0], member("step3/config.yaml", f["config.yaml"], pax_headers={"size": str(10**15)})],
        format=tarfile.PAX_FORMAT,
    ),
    "a sparse file": lambda f: packed(
        [
            honest(f)[0],
            member(
                "step3/config.yaml",
                f["config.yaml"],
                pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(10**12)},
            ),
        ],
        format=tarfile.PAX_FORMAT,
    ),
    "many headers before a file": lambda f: packed(honest(f)[:1])[:-10240] + _extension() * 5000,
    "many headers before the manifest": lambda f: _extension() * 5000 + packed(honest(f)),
    "many long names": lambda f: _extension(tarfile.GNUTYPE_LONGNAME) * 5000 + packed(honest(f)),
    "a negative size": lambda f: packed(honest(f)[:1])[:-10240] + _sized("step3/config.yaml", -512).tobuf(),
    "a gzip bomb": lambda f: gzip.compress(packed(honest(f)) + bytes(400_000_000), 1),
    "a bomb in the manifest": lambda f: gzip.compress(packed(changed(f, "manifest.json", bytes(200_000_000))), 1),
    "an xz bomb": lambda f: lzma.compress(packed(changed(f, "config.yaml", bytes(100_000_000))), preset=0),
    "a bzip2 bomb": lambda f: bz2.compress(packed(changed(f, "config.yaml", bytes(100_000_000))), 1),
    "a bomb of a header": lambda f: gzip.compress(_large_header(), 1),
    "half a gzip": lambda f: gzip.compress(packed(honest(f)))[:-20],
    "a broken xz": lambda f: lzma.compress(packed(honest(f)))[:-8] + b"\0" * 8,
}  # fmt: skip
HARMLESS = ("a gzip bomb",)
"""What follows the end of an archive is never read."""


def _extension(kind: bytes = tarfile.XHDTYPE) -> bytes:
    """A header of this kind, which says something about the one that follows."""
    info = _sized("x", 16, kind)
    return info.tobuf(tarfile.GNU_FORMAT) + b"16 comment=aaaa\n".ljust(512, b"\0")


def _sized(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, "/etc/passwd"
    return info


def _large_header() -> bytes:
    """A header that says that a pax header of a gigabyte follows."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 10**9
    return info.tobuf() + bytes(300_000_000)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_and_writes_nothing(checkpoint: Path, tmp_path: Path, case: str) -> None:
    path = tmp_path / "given"
    path.write_bytes(HOSTILE[case](contents(checkpoint)))
    before = sorted(tmp_path.rglob("*"))
    if case in HARMLESS:
        assert same(dict(make_sync_checkpointer().load(extract_archive(path))), small_state(3))
        return
    refusal = r"(the archive cannot be read|a file of the checkpoint is damaged): .*given"
    with pytest.raises(CheckpointError, match=refusal):
        extract_archive(path)
    left = [one for one in sorted(tmp_path.rglob("*")) if one not in before and one.is_file()]
    assert left == []
    assert not Path("/tmp/outside-trainer-cli").exists()


def _composer_archive(path: Path, *, in_folder: bool, states: dict[str, Any] | None = None) -> None:
    """An archive as Composer writes it: by tarfile, with extended headers, and the folder that was packed."""
    torch.save(states or COMPOSER_STATES, path.parent / "s.pt")
    name, _, kind = path.name.partition(".tar")
    mode: Any = {"": "w", ".gz": "w:gz", ".bz2": "w:bz2", ".lzma": "w:xz"}[kind]
    with tarfile.open(path, mode) as archive:
        if in_folder:
            folder = path.parent / name
            folder.mkdir()
            os.rename(path.parent / "s.pt", folder / "composer_states.pt")
            archive.add(folder, arcname="")
        else:
            archive.add(path.parent / "s.pt", arcname="composer_states.pt")


COMPOSER_STATES = {
    "state": {"model": {"weight": torch.ones(1, 2)}, "timestamp": {"Timestamp": {"batch": {"value": 7}}}},
    "rng": [],
}


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.bz2", ".tar.lzma"])
def test_the_weights_in_an_archive_of_composer_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, in_folder: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / f"ep1-ba7-rank0{ending}"
    _composer_archive(path, in_folder=in_folder)
    for _ in range(2):
        found = read_foreign(select_one(str(path)))
        assert (found.program, found.step) == ("Composer checkpoint", 7)
        assert found.model["weight"].tolist() == [[1.0, 1.0]]
    model = torch.nn.Linear(2, 1, bias=False)
    load_checkpoint(tmp_path / f"ep1-ba7-rank{{rank}}{ending}", model, finetune=True)
    assert model.weight.tolist() == [[1.0, 1.0]]


def test_a_size_in_an_extended_header_is_used(tmp_path: Path) -> None:
    """Of files of 8 GiB or more, whose size the plain header cannot hold."""
    info = tarfile.TarInfo("composer_states.pt")
    info.size, info.pax_headers = 0, {"size": "5"}
    archive = io.BytesIO(info.tobuf(tarfile.PAX_FORMAT) + b"hello".ljust(512, b"\0") + bytes(1024))
    assert [(one.name, b"".join(one.blocks)) for one in read_archive(archive)] == [("composer_states.pt", b"hello")]
