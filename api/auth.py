"""API keys: made, stored as hashes in a TOML file, and compared in constant time.

    [keys.alice]
    hash = "sha256:9f86d0..."
    requests_per_minute = 60      # both limits are optional
    tokens_per_minute = 100000

A key is 32 random bytes, so a plain hash suffices: there is nothing to guess. Without a keys file everybody may ask.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from api.calls.prepare import ApiKeyOwner
from api.errors import ApiConfigError, InvalidKeyError
from broker.scripts import Quota

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key of the file."""

    hash: str
    """As `hash_key` writes it."""
    quota: Quota = Quota()


class KeyRing:
    """The keys that may ask, by id; a ring made of None is open to everybody."""

    def __init__(self, keys: Mapping[str, StoredKey] | None) -> None:
        self._keys = keys

    @property
    def is_open(self) -> bool:
        return self._keys is None

    def payer(self, authorization: str | None) -> ApiKeyOwner:
        """Who sent this Authorization header.

        Raises:
            InvalidKeyError: no key, or none of ours.
        """
        if self._keys is None:
            return ApiKeyOwner()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidKeyError("An API key is needed: send it as Authorization: Bearer KEY.")
        presented = hash_key(key.strip())
        found = None
        for key_id, known in self._keys.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(presented, known.hash):
                found = ApiKeyOwner(key_id, known.quota)
        if found is None:
            raise InvalidKeyError("This API key is not known.")
        return found


class KeysFile(KeyRing):
    """The keys of a file, read anew when the file changes; a file that cannot be read leaves the keys as they were."""

    def __init__(self, path: Path) -> None:
        """Raises: ApiConfigError."""
        self._path = path
        self._stamp = _stamp(path)
        super().__init__(_read_keys(path))

    def payer(self, authorization: str | None) -> ApiKeyOwner:
        if (stamp := _stamp(self._path)) != self._stamp:
            self._stamp = stamp
            self._read_anew()
        return super().payer(authorization)

    def _read_anew(self) -> None:
        try:
            self._keys = _read_keys(self._path)
        except ApiConfigError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("read %d keys from %s", len(self._keys), self._path)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None when it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def new_key() -> str:
    """A fresh key, to be shown once."""
    return f"mtplx-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """The form in which a key is stored."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def load_keys(path: Path | None) -> KeyRing:
    """The keys of a file, as it stands at each question; no path means no keys.

    Raises:
        ApiConfigError: it cannot be read, or a line of it is wrong.
    """
    return KeyRing(None) if path is None else KeysFile(path)


def _read_keys(path: Path) -> Mapping[str, StoredKey]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("keys", {})
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ApiConfigError(f"keys file {path}: {error}; allowed: a TOML file with [keys.NAME] tables") from error
    if not isinstance(tables, dict) or not tables:
        raise ApiConfigError(f"keys file {path}: it names no key; allowed: at least one [keys.NAME] table")
    return {name: _stored_key(f"keys file {path}: [keys.{name}]", name, table) for name, table in tables.items()}


def _stored_key(where: str, name: str, table: object) -> StoredKey:
    if not _NAME.fullmatch(name):
        raise ApiConfigError(f"{where}: the name {name!r}; allowed: up to 64 letters, digits, _ and -")
    if not isinstance(table, dict) or not {"hash"} <= set(table) <= {"hash", *Quota._fields}:
        raise ApiConfigError(f"{where}; allowed: hash, and maybe {' and '.join(Quota._fields)}")
    if not isinstance(table["hash"], str) or not _HASH.fullmatch(table["hash"]):
        raise ApiConfigError(f"{where} hash; allowed: sha256: and 64 hexadecimal digits")
    return StoredKey(table["hash"], Quota(**{field: _limit(where, field, table) for field in Quota._fields}))


def _limit(where: str, field: str, table: Mapping[str, object]) -> int:
    value = table.get(field, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ApiConfigError(f"{where} {field} = {value!r}; allowed: a whole number from 1, or 0 for no limit")
    return value
