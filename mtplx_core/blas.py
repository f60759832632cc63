"""Puts a fast matrix product under MLX before MLX is imported; it owns nothing else and imports no MLX.

On Linux the MLX wheel carries a reference BLAS, tens of times slower than OpenBLAS at several rows. Symbols of a
library loaded globally beforehand win over the wheel's own, so the order of loading is all that matters.
"""

from __future__ import annotations

import ctypes
import functools
import sys

OPENBLAS_LIBRARY = "libopenblas.so.0"
SLOW_HINT = "install the Debian package libopenblas0-pthread"


@functools.cache
def load_blas() -> str:
    """Load OpenBLAS where MLX would use a slow product otherwise, and say which product this process uses.

    Call it before anything imports `mlx`; later calls return the first answer.
    """
    if sys.platform == "darwin":
        return "Accelerate/Metal"
    if "mlx.core" in sys.modules:
        return "reference BLAS (slow): mlx was imported before load_blas() ran"
    try:
        library = ctypes.CDLL(OPENBLAS_LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return f"reference BLAS (slow): {OPENBLAS_LIBRARY} not found, {SLOW_HINT}"
    return _describe(library)


def _describe(library: ctypes.CDLL) -> str:
    library.openblas_get_config.restype = ctypes.c_char_p
    config = library.openblas_get_config().decode("ascii", "replace").split()
    version = next((word for word in config if word[0].isdigit()), "")
    return f"OpenBLAS {version}, {library.openblas_get_num_threads()} threads".replace(" ,", ",")
