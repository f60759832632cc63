"""Reads a hub repository's configuration and the headers of its weight files, not the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

from mtplx_core.errors import ModelLoadError
from mtplx_core.inspection import Outline


class HuggingFaceHub:
    """See `Hub`."""

    def config(self, repository: str) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json.loads(Path(hf_hub_download(repository, "config.json")).read_text())
        except Exception as error:  # the hub client's errors share no base class
            raise ModelLoadError(f"{repository} has no configuration that can be read: {error}") from error
        return config

    def outlines(self, repository: str) -> dict[str, dict[str, Outline]]:
        api = HfApi()
        try:
            files = [file for file in api.list_repo_files(repository) if file.endswith(".safetensors")]
            headers = {file: api.parse_safetensors_file_metadata(repository, file) for file in files}
        except Exception as error:
            raise ModelLoadError(f"{repository} cannot be read: {error}") from error
        return {
            file: {name: Outline(tensor.dtype, tuple(tensor.shape)) for name, tensor in header.tensors.items()}
            for file, header in headers.items()
        }
