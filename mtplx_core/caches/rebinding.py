"""Lets one object of a foreign class call something of ours, without touching the module that class came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def rebound(function: Any, names: Mapping[str, Callable[..., Any]]) -> Any:
    """A copy of a function that finds other objects under some of its module's names; the module stays as it is.

    Raises:
        TypeError: the function does not use these names.
    """
    missing = [name for name in names if name not in function.__code__.co_names]
    if missing:
        raise TypeError(f"{function.__qualname__} of mlx-lm does not call {', '.join(missing)}")
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
