"""A secret key of the user, by which files that this user's runs wrote are told from those of others."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from trainer_cli.files import sync

_BYTES = 32


def sign(content: object) -> str | None:
    """The code of a content, as JSON has it, by the user's key, which is made at its first use; None if there is no
    place for a key."""
    key = _read_key() or _make_key()
    return None if key is None else _compute_code(key, content)


def is_signed(content: object, code: object) -> bool:
    """Whether `sign` of this user has returned the code for the content."""
    key = _read_key()
    if key is None or not isinstance(code, str):
        return False
    return hmac.compare_digest(_compute_code(key, content).encode(), code.encode())


def _compute_code(key: bytes, content: object) -> str:
    return hmac.digest(key, json.dumps(content, sort_keys=True).encode(), "sha256").hex()


def _key_file() -> Path:
    folder = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(folder) / "trainer-cli" / "key"


def _read_key() -> bytes | None:
    """The key; None without one, and if others may have written or read it."""
    try:
        with open(_key_file(), "rb") as file:
            status = os.fstat(file.fileno())
            is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
            key = file.read(_BYTES + 1)
    except OSError:
        return None
    return key if is_private and len(key) == _BYTES else None


def _make_key() -> bytes | None:
    """Make the key, unless another process is faster; None if its folder cannot be written, or is not known."""
    file = _key_file()
    # The home of a user who has none stays "~".
    if not file.is_absolute():
        return None
    staged = file.with_name(f".{secrets.token_hex(4)}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
            output.write(secrets.token_bytes(_BYTES))
            output.flush()
            sync(output.fileno())
        # Unlike a rename, a link never replaces the key that another process has signed with.
        os.link(staged, file)
        sync(file.parent)
    except OSError:
        pass
    finally:
        with suppress(OSError):
            staged.unlink()
    return _read_key()
