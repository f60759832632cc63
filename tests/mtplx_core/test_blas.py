"""Which matrix product a process says it uses. Engine: none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mtplx_core.blas import load_blas


def say(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_process_says_which_product_it_uses() -> None:
    assert load_blas().startswith(("OpenBLAS", "Accelerate", "reference BLAS (slow)"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX brings a fast product itself")
def test_loading_too_late_is_said() -> None:
    assert "imported before" in say("import mlx.core; from mtplx_core.blas import load_blas; print(load_blas())")


def test_loading_twice_changes_nothing() -> None:
    assert load_blas() == load_blas()


def test_loading_imports_no_mlx() -> None:
    assert say("import sys; from mtplx_core.blas import load_blas; load_blas(); print('mlx' in sys.modules)") == "False"
