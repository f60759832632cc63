"""Turns declared options into click flags. Values stay text here: `settings` alone checks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from console.options import Option
from console.settings import options

F = TypeVar("F", bound=Callable[..., Any])


def takes(*groups: str) -> Callable[[F], F]:
    """Give a command the flags of these option groups; it gets their raw values as keyword arguments."""

    def decorate(command: F) -> F:
        for option in reversed(options().values()):
            if set(groups) & set(option.rule.groups):
                command = _flag(option)(command)
        return command

    return decorate


def _flag(option: Option) -> Callable[[F], F]:
    """The click flag of one option."""
    is_list = option.kind is tuple
    default = f"[{option.allowed}" + ("" if option.default in (None, ()) else f"; default {option.default}") + "]"
    return click.option(
        f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool else option.flag,
        option.name,
        default=None,
        metavar=None if option.kind is bool else option.name.upper(),
        hidden=option.rule.is_hidden,
        multiple=is_list,
        help=f"{option.rule.help}{' May be repeated.' if is_list else ''}  {default}",
    )
