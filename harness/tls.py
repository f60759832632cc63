"""Certificates for tests of encrypted connections, made by the `openssl` command; good for a day."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Certificates:
    """One authority, and a certificate of 127.0.0.1 that it has signed."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Skips the test where there is no `openssl`, and fails it where `CI` is set."""
    if shutil.which("openssl") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no openssl on this machine")
    folder.mkdir()
    made = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    authority_key, request, names = folder / "authority.key", folder / "request.pem", folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl("req", "-x509", *new_key, "-keyout", authority_key, "-out", made.authority, "-days", "1", "-subj", "/CN=a")
    _openssl("req", *new_key, "-keyout", made.key, "-out", request, "-subj", "/CN=127.0.0.1")
    signed_by = ("-CA", made.authority, "-CAkey", authority_key, "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *signed_by, "-out", made.certificate, "-days", "1", "-extfile", names)
    return made


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
