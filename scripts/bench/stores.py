"""Processor seconds of a client that sends a checkpoint to an object store, ours beside others.

The store is `sink.py`, in another process. Each client is a process of its own, whose processor time is counted
between a first upload, which connects, and its last: `python scripts/bench/stores.py CLIENT ENDPOINT FILE COUNT`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from settings import Settings
from table import Column, Row, Table
from timing import HERE, Measure, asked, interleaved, require

PART_BYTES = 16 * 1024 * 1024
AT_ONCE = 8
BUCKET, KEY = "bench", "step1/rank0.safetensors"
OURS = "train"
KEYS = {
    "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
Upload = Callable[[], object]


def measure(settings: Settings) -> list[Table]:
    """One table; over TLS, as to a store, where openssl can make a certificate."""
    size_bytes = settings.pick(smoke=1, quick=64, whole=256) * 1024 * 1024
    count = settings.pick(smoke=1, quick=2, whole=8)
    file = settings.scratch / "rank0.safetensors"
    file.write_bytes(os.urandom(size_bytes))
    certificate = _certificate(settings.scratch)
    with _sink(certificate) as endpoint:
        env = {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_CA_BUNDLE": str(certificate or "")}
        contenders: dict[str, Measure] = {
            client: partial(_measured, client, [endpoint, str(file), str(count)], env) for client in CLIENTS
        }
        samples, skipped = interleaved(contenders, settings.rounds_or(2, 5), warm=0, needed=[OURS])
    columns = [
        Column("processor", "s/GB", 2, resolution=0.1),
        Column("time", "s/GB", 2, resolution=0.5, ratio=False),
    ]
    notes = [
        f"{count} uploads of {size_bytes / 1e6:,.0f} MB, {'over TLS' if certificate else 'without TLS'}, in parts of "
        f"16 MiB, {AT_ONCE} at once. The processor time is that of the client's process; the time is also that of the "
        "server, which shares the machine. All but `obstore, unsigned` send a checksum or a signature "
        "of the content."
    ]
    rows = [Row(name, found) for name, found in samples.items()]
    facts = {"bytes": size_bytes, "count": count}
    return [Table("stores", "Sending to an object store", OURS, columns, rows, facts, skipped, notes)]


def _measured(client: str, arguments: list[str], env: dict[str, str]) -> dict[str, float]:
    for package in PACKAGES[client]:
        require(package)
    found: dict[str, float] = asked([sys.executable, str(HERE / "stores.py"), client, *arguments], env=env, limit_s=300)
    return found


def _certificate(folder: Path) -> Path | None:
    """A certificate for localhost, its key beside it; None without openssl."""
    if shutil.which("openssl") is None:
        return None
    certificate = folder / "localhost.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    files = ["-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return certificate


@contextmanager
def _sink(certificate: Path | None) -> Iterator[str]:
    """The address of a server in another process."""
    command = [sys.executable, str(HERE / "sink.py"), *([] if certificate is None else [str(certificate)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            scheme = "http" if certificate is None else "https"
            yield f"{scheme}://localhost:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def _train(endpoint: str, file: Path) -> Upload:
    from trainer_cli.addons.stores.object_client import ObjectClient

    # The server knows no conditions, so each upload sends the file.
    return partial(ObjectClient(f"s3://{BUCKET}").upload_new, KEY, file)


def _s3fs(endpoint: str, file: Path) -> Upload:
    import s3fs

    return partial(s3fs.S3FileSystem(cache_regions=False).put_file, str(file), f"{BUCKET}/{KEY}")


def _obstore(endpoint: str, file: Path, *, unsigned: bool = False) -> Upload:
    import obstore
    from obstore.store import S3Store

    # It takes no certificate of one's own.
    options = {"allow_http": True, "allow_invalid_certificates": True}
    store = S3Store(BUCKET, endpoint=endpoint, client_options=options, unsigned_payload=unsigned)
    return partial(obstore.put, store, KEY, file, chunk_size=PART_BYTES, max_concurrency=AT_ONCE)


def _boto3(endpoint: str, file: Path) -> Upload:
    import boto3
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig(
        multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=AT_ONCE,
        preferred_transfer_client="classic",
    )  # fmt: skip
    return partial(boto3.client("s3").upload_file, str(file), BUCKET, KEY, Config=config)


def _crt(endpoint: str, file: Path) -> Upload:
    """What boto3 sends by where awscrt is installed; called directly, since boto3 gives it no address."""
    from botocore.session import Session
    from s3transfer import crt

    session = Session()
    tls = endpoint.startswith("https")
    client = crt.create_s3_crt_client(
        KEYS["AWS_DEFAULT_REGION"],
        crt_credentials_provider=crt.BotocoreCRTCredentialsWrapper(
            session.get_credentials()
        ).to_crt_credentials_provider(),
        part_size=PART_BYTES, use_ssl=tls, verify=os.environ["AWS_CA_BUNDLE"] if tls else None,
    )  # fmt: skip
    facts = {"region_name": KEYS["AWS_DEFAULT_REGION"], "endpoint_url": endpoint}
    manager = crt.CRTTransferManager(client, crt.BotocoreCRTRequestSerializer(session, facts))
    return lambda: manager.upload(str(file), BUCKET, KEY).result()


CLIENTS: dict[str, Callable[[str, Path], Upload]] = {
    OURS: _train,
    "s3fs": _s3fs,
    "obstore": _obstore,
    "obstore, unsigned": partial(_obstore, unsigned=True),
    "boto3": _boto3,
    "boto3 CRT": _crt,
}
PACKAGES = {
    OURS: ["s3fs"], "s3fs": ["s3fs"], "obstore": ["obstore"], "obstore, unsigned": ["obstore"], "boto3": ["boto3"],
    "boto3 CRT": ["boto3", "awscrt"],
}  # fmt: skip


def main() -> None:
    client, endpoint, file, count = sys.argv[1:]
    upload = CLIENTS[client](endpoint, Path(file))
    upload()
    before, began = _processor_s(), time.perf_counter()
    for _ in range(int(count)):
        upload()
    gigabytes = int(count) * os.path.getsize(file) / 1e9
    found = {
        "processor": (_processor_s() - before) / gigabytes,
        "time": (time.perf_counter() - began) / gigabytes,
    }
    print(json.dumps(found))


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
