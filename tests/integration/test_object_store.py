"""`train` with its checkpoints in an object store, through the real command against a local S3 server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import SMALL, Result, records, running, train, trained
from compare import final_state
from s3 import new_bucket, s3_server

from trainer_cli.addons.stores import object_client
from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server() as address:
        # Each command would import it, as the store's client does.
        assert train("env", cwd=tmp_path_factory.mktemp("imports"), imports=("s3fs",)).code == 0
        yield address


@pytest.fixture
def url(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"s3://{new_bucket(endpoint)}/run"


@pytest.mark.parametrize("lost", [False, True], ids=["the run is there", "its directory is lost"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_run_that_has_only_step_0_in_the_store_begins_anew(url: str, tmp_path: Path, ranks: int, lost: bool) -> None:
    several = ("parallel=ddp", "parallel.processes_per_node=2") if ranks > 1 else ()
    common = ("experiment=digits_mlp", "loop.max_duration=100", "loop.eval_interval=null", *several)
    # The ranks end by themselves after the process that has started them.
    saves = ("checkpoint.save_interval=null", "checkpoint.save_on_stop=false")
    run = (*common, "name=mine", f"checkpoint.folder={url}", *saves)
    with running("fit", *run, "loop.max_duration=100000", cwd=tmp_path) as process:
        from trainer_cli.addons.stores.object_client import ObjectClient

        client = ObjectClient(url)
        process.wait_for(lambda: client.get("step0/manifest.json") is not None, "step 0 in the store")
        process.signal(signal.SIGKILL)
    if lost:
        shutil.rmtree(tmp_path / "runs/mine")
    corrected = ("model.hidden=[16]", "seed=3")
    trained(*run, *corrected, cwd=tmp_path)
    assert "at step 0 (anew: it has no checkpoint after step 0)" in (tmp_path / "runs/mine/train.log").read_text()
    trained(*common, *corrected, "name=fresh", cwd=tmp_path)
    ends = [final_state(tmp_path / f"runs/{name}") for name in ("mine", "fresh")]
    assert ends[0]["name"] == "step100"
    assert ends[0] == ends[1]


def test_a_run_whose_disk_is_lost_goes_on_from_the_store_bit_for_bit(url: str, tmp_path: Path) -> None:
    long = ("experiment=digits_mlp", "loop.max_duration=300", "checkpoint.save_interval=100", "loop.eval_interval=300")
    trained(*long, "name=straight", cwd=tmp_path)
    lost = (*long, "name=lost", f"checkpoint.folder={url}")
    with running("fit", *lost, "loop.log_interval=1", cwd=tmp_path) as process:
        from trainer_cli.addons.stores.object_client import ObjectClient

        client = ObjectClient(url)
        process.wait_for(lambda: client.get("step100/manifest.json") is not None, "step 100 in the store")
        process.signal(signal.SIGKILL)
    shutil.rmtree(tmp_path / "runs/lost")
    result = trained(*lost, cwd=tmp_path)
    assert "(runs/lost is gone, but s3://" in result.err
    assert int(result.err.split("resuming at step ")[1].split()[0]) in (100, 200)
    ends = [final_state(tmp_path / f"runs/{name}") for name in ("straight", "lost")]
    assert ends[0]["name"] == "step300"
    assert ends[0] == ends[1]


def test_checkpoints_in_the_store_are_kept_evaluated_and_looked_after(url: str, tmp_path: Path) -> None:
    def done_well(*arguments: str) -> Result:
        done = train(*arguments, cwd=tmp_path)
        assert done.code == 0, done.err
        return done

    stored = (*SMALL, "name=stored", f"checkpoint.folder={url}", "checkpoint.max_checkpoints=2")
    result = done_well("fit", *stored)
    assert f"sent {url}/step20" in result.err
    assert [path.name for path in (tmp_path / "runs/stored/checkpoints").iterdir()] == ["step20"]
    again = done_well("fit", *stored)
    assert "is finished at step 20" in again.out + again.err
    result = done_well("validate", f"ckpt={url}/step*")
    folder = tmp_path / "runs/stored/validation"
    assert [row["step"] for row in records(folder / "validation.jsonl")] == [10, 20]
    last = [one for one in records(tmp_path / "runs/stored/metrics.jsonl") if "val/loss" in one][-1]
    assert records(folder / "validation.jsonl")[-1]["val/loss"] == last["val/loss"]
    listed = done_well("ckpt", "ls", url)
    assert ("step10" in listed.out, "step20" in listed.out, "step0 " in listed.out) == (True, True, False)
    done_well("ckpt", "verify", f"{url}/step*")
    done_well("ckpt", "pin", f"{url}/step10")
    done_well("fit", *stored, "loop.max_duration=40")
    names = done_well("ckpt", "ls", url).out
    assert [f"step{n} " in names for n in (10, 20, 30, 40)] == [True, False, True, True]
    fork = done_well("fit", *SMALL, "name=fork", f"ckpt={url}")
    assert f"weights from {url}/step40 step 40" in fork.err
    planned = done_well("plan", *stored, "loop.max_duration=50")
    assert f"{url}/step40 (step 40)" in planned.out


def test_the_same_command_sends_the_final_checkpoint_of_a_run_whose_store_refused_it(url: str, tmp_path: Path) -> None:
    from trainer_cli.addons.stores.object_client import ObjectClient

    client, stored = ObjectClient(url), (*SMALL, "name=stored", f"checkpoint.folder={url}")
    # The claim of another run, so that this one cannot send its checkpoint.
    client.put("step20/.writing", b"another run")
    refused = train("fit", *stored, cwd=tmp_path)
    assert (refused.code, "step20 could not be sent" in refused.err) == (1, True), refused.err
    client.delete("step20/.writing")
    again = trained(*stored, cwd=tmp_path)
    assert f"sent {url}/step20" in again.err
    assert client.get("step20/manifest.json") is not None


def test_a_file_of_another_program_is_fetched_from_the_store(
    url: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    from trainer_cli.models.mlp import MLP

    torch.manual_seed(0)
    safetensors.torch.save_file(MLP(hidden=[128]).state_dict(), tmp_path / "w.safetensors")
    bucket = url.split("/")[2]
    boto3.client("s3", endpoint_url=endpoint).upload_file(
        str(tmp_path / "w.safetensors"), bucket, "files/w.safetensors"
    )
    for keys in ([], ["load.progress=false"]):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{len(keys)}"))
        tuned = (*SMALL, f"name=tuned{len(keys)}", f"ckpt=s3://{bucket}/files/w.safetensors", *keys)
        result = trained(*tuned, cwd=tmp_path)
        assert "w.safetensors (4 tensors)" in result.err
        assert ("downloading" in result.err) is (not keys)


def test_a_bucket_that_is_missing_is_one_message_and_leaves_no_directory(
    endpoint: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *SMALL, "checkpoint.folder=s3://no-such-bucket/run"]) == 2
    error = capsys.readouterr().err
    assert "error: s3://no-such-bucket/run cannot be written: " in error
    assert "Make the bucket first." in error
    assert os.listdir(empty_folder) == []


def test_a_store_that_is_away_is_one_message(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in away.items():
        monkeypatch.setenv(name, value)
    from s3fs import S3FileSystem

    # The client of another test in this process has another endpoint.
    monkeypatch.setattr(S3FileSystem, "cachable", False)
    # In this process, to leave out the pauses between the attempts, ours and those of the client below.
    sleep = asyncio.sleep
    monkeypatch.setattr(object_client, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *result: sleep(0, *result))
    assert main(["fit", *SMALL, "checkpoint.folder=s3://bucket/run"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "error: list failed 6 times:" in error
    assert "Check the network and the address of the store." in error
    assert os.listdir(empty_folder) == []


def test_a_killed_run_goes_on_bit_for_bit_from_its_copies_in_the_store(url: str, tmp_path: Path) -> None:
    long = ("experiment=digits_mlp", "loop.max_duration=300", "checkpoint.save_interval=50", "loop.eval_interval=300")
    trained(*long, "name=straight", cwd=tmp_path)
    lost = (*long, "name=lost", f"checkpoint.copy_to.folder={url}", "checkpoint.copy_to.every=2")
    with running("fit", *lost, "loop.log_interval=1", cwd=tmp_path) as process:
        from trainer_cli.addons.stores.object_client import ObjectClient

        client = ObjectClient(url)
        process.wait_for(lambda: client.get("step100/manifest.json") is not None, "a copy of step 100 in the store")
        process.signal(signal.SIGKILL)
    shutil.rmtree(tmp_path / "runs/lost/checkpoints")
    result = trained(*lost, cwd=tmp_path)
    assert f"is taken from the copies in {url}" in result.err
    assert int(result.err.split("resuming at step ")[1].split()[0]) in (100, 200)
    ends = [final_state(tmp_path / f"runs/{name}") for name in ("straight", "lost")]
    assert ends[0] == ends[1]
    assert {"step200/manifest.json", "step300/manifest.json"} <= set(client.list())
    assert not [key for key in client.list() if key.startswith("step50/")]
    shutil.rmtree(tmp_path / "runs/lost")
    assert "is finished at step 300" in trained(*lost, cwd=tmp_path).out
