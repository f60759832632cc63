"""The limit of open files is raised when an API process starts. Engine: none; no Redis."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from api.http.descriptors import allow_many_connections
limit = allow_many_connections()
assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0], limit
assert limit == allow_many_connections()
print(limit > 64 or limit == hard)
"""


def test_soft_limit_of_open_files_is_raised() -> None:
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)

    assert told.stdout.strip() == "True"
