"""Checkpoints and files of other programs on a web server, whatever its habits and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from states import same, small_state
from web import Habits, web_server

from trainer_cli.addons.formats.read import read_foreign
from trainer_cli.addons.formats.whole_archive import write_archive
from trainer_cli.catalog.find import latest_checkpoint
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.commands import ckpt_remove
from trainer_cli.commands.ckpt_inspect import open_content
from trainer_cli.commands.command_line import main
from trainer_cli.errors import CheckpointError, StoreAwayError, UserError
from trainer_cli.models.mlp import MLP
from trainer_cli.selection.patterns import select_one
from trainer_cli.selection.stored import StoredCheckpoint
from trainer_cli.storage.downloads import DOWNLOADS, DownloadSettings

WEIGHTS = {"weight": torch.arange(6.0).reshape(2, 3)}
HABITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranges": {"ranges": True},
    "no sizes": {"says_size": False},
    "redirects": {"redirects": True, "ranges": True},
    "a cut reply": {"faults": ["", "cut"]},
    "a cut reply without size": {"says_size": False, "faults": ["", "cut"]},
    "a cut part": {"ranges": True, "faults": ["", "cut"]},
    "a dropped request": {"faults": ["drop"]},
    "an error": {"faults": ["503", "429", "", "500"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`www` with a checkpoint, an archive of it, and files of other programs."""
    www = tmp_path_factory.mktemp("www")
    for step in (3, 12):
        make_sync_checkpointer().save(small_state(step), www / f"checkpoints/step{step}")
    write_archive(www / "checkpoints/step3", www / "step3.tar.gz")
    torch.save(WEIGHTS, www / "w.pt")
    (www / "hf").mkdir()
    safetensors.torch.save_file(WEIGHTS, www / "hf/model.safetensors")
    (www / "hf/empty.txt").touch()
    (www / "with space+sign.pt").write_bytes((www / "w.pt").read_bytes())
    return www


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("trainer_cli.addons.stores.object_client._FIRST_WAIT_S", 0.0)
    monkeypatch.setattr("trainer_cli.addons.stores.object_client._LONGEST_WAIT_S", 0.0)


def _loads(url: str, step: int = 3) -> None:
    assert same(dict(make_sync_checkpointer().load(select_one(url))), small_state(step))


def _reads(url: str) -> None:
    path = select_one(url)
    assert torch.equal(read_foreign(path).model["weight"], WEIGHTS["weight"])
    assert {one.name for one in path.parent.rglob("empty.txt") if one.stat().st_size == 0} <= {"empty.txt"}


def _verifies(url: str) -> None:
    assert list(ckpt_remove.verify_all(ckpt_remove.find_items([url]), lambda done, item: None).values()) == [None]


def _shows(url: str) -> None:
    with open_content(select_one(url)) as content:
        assert content.states()
    assert StoredCheckpoint(select_one(url)).read("rank0.json")


def _finds_latest(url: str) -> None:
    assert latest_checkpoint(url).name == "step12"


READERS: dict[str, tuple[str, Callable[[str], None]]] = {
    "a checkpoint": ("checkpoints/step3", _loads),
    "the newest of a folder": ("checkpoints", lambda url: _loads(url, 12)),
    "the newest of a glob": ("checkpoints/step*", lambda url: _loads(url, 12)),
    "latest_checkpoint": ("checkpoints", _finds_latest),
    "verify": ("checkpoints/step3", _verifies),
    "show": ("checkpoints/step3", _shows),
    "an archive": ("step3.tar.gz", _loads),
    "a file of torch": ("w.pt", _reads),
    "a name with signs": ("with space+sign.pt", _reads),
    "a signed address": ("w.pt?signature=a/b*c&x=[1]", _reads),
    "a Hugging Face folder": ("hf", _reads),
}


# All readers share the client, where the habits of a server matter; so not each meets each.
PAIRS = [(reader, "plain") for reader in READERS]
PAIRS += [(reader, habit) for reader in ("a checkpoint", "an archive", "a file of torch") for habit in [*HABITS][1:]]


@pytest.mark.parametrize(("reader", "habit"), PAIRS)
def test_every_reader_reads_from_a_web_server(folder: Path, habit: str, reader: str) -> None:
    place, read = READERS[reader]
    with web_server(folder, Habits(**HABITS[habit])) as address:
        read(f"{address}/{place}")


@pytest.mark.parametrize("place", ["checkpoints/step3", "step3.tar.gz", "w.pt"])
def test_a_server_without_pages_gives_what_is_named_itself(folder: Path, place: str) -> None:
    read = _reads if place == "w.pt" else _loads
    with web_server(folder, Habits(has_pages=False)) as address:
        read(f"{address}/{place}")
        with pytest.raises(CheckpointError, match=r"matches nothing.*may show no list of its files"):
            select_one(f"{address}/checkpoints/step*")


@pytest.mark.parametrize("place", ["checkpoints/step3", "step3.tar.gz", "w.pt", "hf"])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("500", StoreAwayError, "HTTP status 500"),
        ("503", StoreAwayError, "HTTP status 503"),
        ("cut", StoreAwayError, r"bytes came instead of|IncompleteRead"),
        ("drop", StoreAwayError, "RemoteDisconnected"),
        ("403", UserError, "gives no access.*HTTP status 403"),
        ("400", UserError, "cannot be read: HTTP status 400"),
        ("404", CheckpointError, "matches no"),
    ],
)
def test_a_fault_of_the_server_is_told_as_what_it_is(
    folder: Path, place: str, fault: str, error: type[Exception], message: str
) -> None:
    with web_server(folder, Habits(always=fault)) as address, pytest.raises(error, match=message):
        make_sync_checkpointer().load(select_one(f"{address}/{place}"))


def test_a_file_that_is_missing_on_the_server_is_damage(folder: Path, tmp_path: Path) -> None:
    make_sync_checkpointer().save(small_state(1), tmp_path / "www/step1")
    (tmp_path / "www/step1/rank0.json").unlink()
    with (
        web_server(tmp_path / "www", Habits()) as address,
        pytest.raises(CheckpointError, match=r"rank0\.json is missing"),
    ):
        _loads(f"{address}/step1", 1)


def test_a_file_that_changes_while_it_is_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "www").mkdir()
    path = tmp_path / "www/w.pt"
    torch.save(WEIGHTS, path)
    habits = Habits(ranges=True)
    with web_server(tmp_path / "www", habits) as address:
        from trainer_cli.addons.stores.object_client import ObjectClient

        usual = ObjectClient.get_range

        def change_after(client: ObjectClient, *args: Any) -> bytes:
            content = usual(client, *args)
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
            return content

        monkeypatch.setattr(ObjectClient, "get_range", change_after)
        with pytest.raises(StoreAwayError, match="it was changed while it was read"):
            select_one(f"{address}/w.pt")
    assert not list(tmp_path.rglob("cache/**/*w.pt"))


def test_large_files_come_in_parts_where_the_server_sends_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_cli.addons.stores.object_client.PART_BYTES", 100)
    monkeypatch.setattr("trainer_cli.addons.stores.object_client._BLOCK_BYTES", 64)
    (tmp_path / "www").mkdir()
    torch.save(WEIGHTS, tmp_path / "www/w.pt")
    size = (tmp_path / "www/w.pt").stat().st_size
    for ranges in (True, False):
        habits = Habits(ranges=ranges, faults=["", "cut", "", "cut"])
        with web_server(tmp_path / "www", habits) as address:
            _reads(f"{address}/w.pt")
            requests = sum(request == "/w.pt" for request in habits.requests)
            assert (requests > size // 100) is ranges


@pytest.mark.parametrize("command", ["plan", "validate", pytest.param("predict", marks=pytest.mark.addon("predict"))])
def test_the_size_of_requests_and_the_progress_have_keys(
    command: str, empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in asdict(DownloadSettings()).items():
        monkeypatch.setattr(DOWNLOADS, name, value)
    (empty_folder / "www").mkdir()
    torch.save(MLP(hidden=[1024]).state_dict(), empty_folder / "www/w.pt")
    size = (empty_folder / "www/w.pt").stat().st_size
    habits, counts = Habits(ranges=True), []
    with web_server(empty_folder / "www", habits) as address:
        for number, keys in enumerate(([], ["load.chunk_size=65536", "load.progress=false"])):
            monkeypatch.setenv("XDG_CACHE_HOME", str(empty_folder / f"cache{number}"))
            habits.requests.clear()
            experiment = [
                "experiment=digits_mlp",
                "model.hidden=[1024]",
                f"name=r{number}",
                f"predict.folder=there{number}",
            ]
            assert main([command, *experiment, f"ckpt={address}/w.pt", *keys]) == 0
            counts.append(sum(request == "/w.pt" for request in habits.requests))
            assert ("downloading" in capsys.readouterr().err) is (not keys)
    assert counts[1] - counts[0] == math.ceil(size / 65536) - 1 > 0


def test_a_server_that_is_away_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_cli.addons.stores.object_client._FIRST_WAIT_S", 0.0)
    with pytest.raises(StoreAwayError, match=r"failed 6 times: .*refused"):
        select_one("http://127.0.0.1:9/w.pt")
