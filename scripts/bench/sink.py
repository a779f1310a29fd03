"""A stand-in for an S3 server that drains what is sent to it and keeps only sizes: `python sink.py [CERTIFICATE]`.

Prints its port. It costs little, so that a client is measured and not the server: bodies are dropped as they come, and
signatures and checksums are not looked at. With a certificate, whose key is beside it in a file `.key`, it speaks TLS.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import sys
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_BLOCK_BYTES = 1024 * 1024
_XML = '<?xml version="1.0" encoding="UTF-8"?><{0} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{1}</{0}>'
_OBJECT = '<Bucket>b</Bucket><Key>k</Key><ETag>"1"</ETag>'


class Sink:
    """The requests of an upload: PUT, the three of a multipart upload, and HEAD, which answers with the size."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        """Bytes of each object that was sent whole."""
        self._uploads: dict[str, int] = {}
        """Bytes of the parts of each multipart upload."""
        self._numbers = itertools.count()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while line := (await reader.readline()).decode().strip():
                method, target, _ = line.split(" ")
                headers = await _read_headers(reader)
                if headers.get("expect") == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                received = await _drain(reader, headers)
                url = urlsplit(target)
                query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
                writer.write(self._answer(method, url.path, query, received))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass  # The client is gone.
        finally:
            writer.close()

    def _answer(self, method: str, key: str, query: dict[str, str], received: int) -> bytes:
        match method:
            case "PUT" if "uploadId" in query:
                self._uploads[query["uploadId"]] += received
            case "PUT":
                self._sizes[key] = received
            case "POST" if "uploads" in query:
                number = str(next(self._numbers))
                self._uploads[number] = 0
                content = f"{_OBJECT}<UploadId>{number}</UploadId>"
                return _reply("200 OK", _XML.format("InitiateMultipartUploadResult", content))
            case "POST":
                self._sizes[key] = self._uploads.pop(query["uploadId"])
                return _reply("200 OK", _XML.format("CompleteMultipartUploadResult", _OBJECT))
            case "HEAD" if key in self._sizes:
                return _reply("200 OK", size_bytes=self._sizes[key])
            case "HEAD":
                return _reply("404 Not Found")
            case _:
                return _reply("501 Not Implemented")
        return _reply("200 OK")


async def _read_headers(reader: StreamReader) -> dict[str, str]:
    headers = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


async def _drain(reader: StreamReader, headers: dict[str, str]) -> int:
    """Drop the body of a request; the bytes of the object in it."""
    total = int(headers.get("content-length", "0"))
    await _skip(reader, total)
    if headers.get("transfer-encoding") == "chunked":
        while size_bytes := int((await reader.readline()).split(b";")[0], 16):
            await _skip(reader, size_bytes + len("\r\n"))
            total += size_bytes
        while (await reader.readline()).strip():
            pass  # Trailing headers.
    # Where the object is sent in signed chunks, the body is larger.
    return int(headers.get("x-amz-decoded-content-length", total))


async def _skip(reader: StreamReader, size_bytes: int) -> None:
    while size_bytes:
        block = await reader.read(min(size_bytes, _BLOCK_BYTES))
        if not block:
            raise ConnectionError
        size_bytes -= len(block)


def _reply(status: str, body: str = "", *, size_bytes: int | None = None) -> bytes:
    length = len(body) if size_bytes is None else size_bytes
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}", "Content-Type: application/xml", 'ETag: "1"',
             "Last-Modified: Mon, 05 Jan 2026 00:00:00 GMT", "x-amz-request-id: 1", "", body]  # fmt: skip
    return "\r\n".join(lines).encode()


async def main(certificate: Path | None) -> None:
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server = await asyncio.start_server(Sink().serve, "127.0.0.1", 0, limit=_BLOCK_BYTES, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
