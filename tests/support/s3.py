"""An S3 server on this machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_numbers = itertools.count()


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server; the environment of this process points to it."""
    # Here, as importing them takes long.
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=endpoint)
    # fsspec keeps its clients, which remember the address of an earlier server.
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield endpoint
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def new_bucket(endpoint: str) -> str:
    """A bucket of its own."""
    name = f"bucket-{os.getpid()}-{next(_numbers)}"
    # Without boto3, whose import takes 0.4 s; this server looks at no signature.
    urlopen(Request(f"{endpoint}/{name}", method="PUT")).close()
    return name
