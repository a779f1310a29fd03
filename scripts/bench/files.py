"""Seconds to verify, archive, export and send a checkpoint, beside torch.save, safetensors, DCP and tar."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import disk
import ours
import trainer_cli
from settings import Settings
from state import flat, gpt_state, size_bytes
from table import Column, Row, Table
from timing import Measure, Skipped, interleaved, say, seconds

COPY = "cp and fsync"
PATIENT = {"config_kwargs": {"read_timeout": 600}}
"""For a server that takes long to put the parts of an object together."""


def measure(settings: Settings) -> list[Table]:
    """One table, in this process; each contender writes a file or folder that it removes again."""
    warnings.filterwarnings("ignore", module="torch")
    tree = gpt_state(settings)
    size = size_bytes(tree)
    say(f"a state of {size / 1e9:.2f} GB")
    folder = Path(settings.scratch)
    contenders = _contenders(tree, folder)
    measures: dict[str, Measure] = {name: partial(_timed, make, folder / "out") for name, make in contenders.items()}
    with _s3_server(folder):
        samples, skipped = interleaved(measures, settings.rounds_or(2, 5), warm=settings.warm, needed=[COPY])
    columns = [Column("time", "s", 3, resolution=0.01 if settings.small else 0.05)]
    notes = ["All but verify and DCP's end with an fsync. The store is a local S3 server in another process."]
    rows = [Row(name, found) for name, found in samples.items()]
    title = f"Files of a checkpoint of {size / 1e9:.2f} GB"
    return [Table("files", title, COPY, columns, rows, {"bytes": size}, skipped, notes)]


def _contenders(tree: dict, folder: Path) -> dict[str, Callable[[Path], object]]:
    import safetensors.torch
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    from trainer_cli.checkpoint.export import ExportFormat, export
    from trainer_cli.checkpoint.find import write_archive

    tensors = flat(tree)
    checkpoint = folder / "step1"
    keeper = ours.sync_checkpointer()
    keeper.save(tree, checkpoint)
    file = checkpoint / "rank0.safetensors"
    return {
        COPY: lambda out: (shutil.copyfile(file, out), disk.sync(out)),
        "torch.save": lambda out: (torch.save(tensors, out), disk.sync(out)),
        "safetensors": lambda out: (safetensors.torch.save_file(tensors, out), disk.sync(out)),
        "DCP": lambda out: dcp_save(tree, checkpoint_id=out, no_dist=True),
        "tar": lambda out: (subprocess.run(["tar", "-cf", out, "-C", folder, "step1"], check=True), disk.sync(out)),
        "train, verify": lambda out: keeper.verify(checkpoint),
        "train, archive": lambda out: write_archive(checkpoint, out.with_suffix(".tar")),
        "train, export torch": lambda out: export(tensors, out, ExportFormat.torch),
        "train, export safetensors": lambda out: export(tensors, out, ExportFormat.safetensors),
        "s3fs put": lambda out: _put(file),
        "train, save and send to S3": partial(_send, tree),
    }


@contextmanager
def _s3_server(folder: Path) -> Iterator[None]:
    """A moto server in another process, where BENCH_S3 names no bucket, as s3://bucket/prefix, and moto is there."""
    if "BENCH_S3" in os.environ or importlib.util.find_spec("moto") is None:
        yield
        return
    import fsspec

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(keys, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", BENCH_S3="s3://bench", TMPDIR=str(folder))
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
    try:
        while not _answers(port):
            time.sleep(0.2)
        fsspec.filesystem("s3").mkdir("bench")
        yield
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return False
    return True


def _bucket() -> str:
    url = os.environ.get("BENCH_S3")
    if url is None:
        raise Skipped("BENCH_S3 names no bucket, and moto is not installed")
    return f"{url}/{os.getpid()}"


def _put(file: Path) -> None:
    import fsspec

    store, path = fsspec.url_to_fs(f"{_bucket()}/put", **PATIENT)
    store.put(str(file), path)
    store.rm(path)


def _send(tree: dict, out: Path) -> None:
    from trainer_cli.checkpoint.storage.object_client import ObjectClient
    from trainer_cli.checkpoint.storage.object_store import ObjectStorage

    storage = ObjectStorage(_bucket(), cache=out, client=ObjectClient(_bucket(), options={**PATIENT}))
    keeper = trainer_cli.make_sync_checkpointer(storage=lambda root: storage)
    try:
        keeper.save(tree, f"{storage.url}/step1")
        if left := storage.finish_uploads():
            raise SystemExit(f"{left} could not be sent")
    finally:
        storage.remove("step1")


def _timed(make: Callable[[Path], object], out: Path) -> dict[str, float]:
    try:
        return {"time": seconds(lambda: make(out))}
    finally:
        for path in (out, out.with_suffix(".tar")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
