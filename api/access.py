"""API keys: made, stored as hashes in a TOML file, and compared in constant time.

    [keys.alice]
    hash = "sha256:9f86d0..."

A key is 32 random bytes, so a plain hash suffices: there is nothing to guess. Without a keys file everybody may ask.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path

from api.errors import ApiConfigError, InvalidKeyError
from api.intake import Payer

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class KeyRing:
    """The keys that may ask; an empty ring given None is open to everybody."""

    def __init__(self, hashes: Mapping[str, str] | None) -> None:
        """`hashes` maps key ids to hashes as `hash_key` writes them; None: keys are off."""
        self._hashes = hashes

    @property
    def is_open(self) -> bool:
        return self._hashes is None

    def payer(self, authorization: str | None) -> Payer:
        """Who sent this Authorization header.

        Raises:
            InvalidKeyError: no key, or none of ours.
        """
        if self._hashes is None:
            return Payer()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidKeyError("An API key is needed: send it as Authorization: Bearer KEY.")
        presented = hash_key(key.strip())
        found = None
        for key_id, known in self._hashes.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(presented, known):
                found = key_id
        if found is None:
            raise InvalidKeyError("This API key is not known.")
        return Payer(found)


def new_key() -> str:
    """A fresh key, to be shown once."""
    return f"mtplx-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """The form in which a key is stored."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def load_keys(path: Path | None) -> KeyRing:
    """Read a keys file; no path means no keys.

    Raises:
        ApiConfigError: it cannot be read, or a line of it is wrong.
    """
    if path is None:
        return KeyRing(None)
    try:
        tables = tomllib.loads(path.read_text()).get("keys", {})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ApiConfigError(f"keys file {path}: {error}; allowed: a TOML file with [keys.NAME] tables") from error
    if not isinstance(tables, dict) or not tables:
        raise ApiConfigError(f"keys file {path}: it names no key; allowed: at least one [keys.NAME] table")
    return KeyRing({name: _hash_of(path, name, table) for name, table in tables.items()})


def _hash_of(path: Path, name: str, table: object) -> str:
    if not _NAME.fullmatch(name):
        raise ApiConfigError(f"keys file {path}: name {name!r}; allowed: up to 64 letters, digits, _ and -")
    if not isinstance(table, dict) or set(table) != {"hash"}:
        raise ApiConfigError(f"keys file {path}: [keys.{name}]; allowed: hash, and nothing else")
    if not isinstance(table["hash"], str) or not _HASH.fullmatch(table["hash"]):
        raise ApiConfigError(f"keys file {path}: [keys.{name}] hash; allowed: sha256: and 64 hexadecimal digits")
    return table["hash"]
