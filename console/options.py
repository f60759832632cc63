"""What an option is: how it is declared, spelled, parsed and refused. Knows no option by name."""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")

PREFIX = "MTPLX_"


class ConfigError(Exception):
    """An option has a value that is not allowed, or a name that does not exist. Says which, and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str, *, source: str) -> None:
        what = f"{key} is missing" if value is None else f"{key} = {value!r} is refused"
        super().__init__(f"{source}: {what}; {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, slots=True)
class Rule:
    """What `option` says about a field beside its type and default."""

    help: str
    groups: tuple[str, ...]
    minimum: float | None = None
    maximum: float | None = None
    is_secret: bool = False
    is_hidden: bool = False


def option(
    default: T,
    help: str,
    *groups: str,
    minimum: float | None = None,
    maximum: float | None = None,
    is_secret: bool = False,
    is_hidden: bool = False,
) -> T:
    """Declare one field of `Settings`."""
    rule = Rule(help, groups, minimum, maximum, is_secret, is_hidden)
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, slots=True)
class Option:
    """One option, ready for the command line and for parsing."""

    name: str
    rule: Rule
    default: object
    kind: Any
    """`int`, `float`, `bool`, `str`, `Path`, a Literal, or `tuple` for a list of texts."""
    is_optional: bool

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.name.upper()}"

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def allowed(self) -> str:
        """What a value may be, as the end of a sentence."""
        if self.choices:
            return f"allowed: {', '.join(self.choices)}"
        nouns = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            Path: "a path",
            tuple: "a list of texts",
        }
        noun = nouns.get(self.kind, "text")
        low, high = self.rule.minimum, self.rule.maximum
        bounds = "" if low is None else f" from {low:g}" + ("" if high is None else f" to {high:.7g}")
        return f"allowed: {noun}{bounds}"

    def parse(self, raw: object, *, source: str) -> object:
        """The value of `raw`, text from a flag or variable, or a value from the file.

        Raises:
            ConfigError: not of this option's type, or out of its bounds.
        """
        try:
            value = self._convert(raw)
        except (TypeError, ValueError, KeyError) as error:
            raise self._refuse(raw, source) from error
        if self.choices and value not in self.choices:
            raise self._refuse(raw, source)
        if isinstance(value, int | float) and not self._is_within_bounds(value):
            raise self._refuse(raw, source)
        return value

    def _convert(self, raw: object) -> object:
        if self.kind is tuple:
            return _texts(raw)
        if self.kind is bool:
            return raw if isinstance(raw, bool) else {"true": True, "1": True, "yes": True, "false": False,
                                                      "0": False, "no": False}[str(raw).lower()]  # fmt: skip
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise TypeError("neither text nor a number")
        if self.kind is int:
            return int(raw) if isinstance(raw, str | int) else _whole(raw)
        if self.kind is float:
            return float(raw)
        if not isinstance(raw, str) or not raw:
            raise TypeError("not text, or empty")
        return Path(raw).expanduser() if self.kind is Path else raw

    def _is_within_bounds(self, value: float) -> bool:
        low, high = self.rule.minimum, self.rule.maximum
        return (low is None or value >= low) and (high is None or value <= high)

    def _refuse(self, raw: object, source: str) -> ConfigError:
        shown = "***" if self.rule.is_secret else raw
        return ConfigError(self.name, shown, self.allowed, source=source)


def options_of(settings: type[Any]) -> dict[str, Option]:
    """The options that a dataclass declares, by name, in order."""
    kinds = typing.get_type_hints(settings)
    return {declared.name: _option_of(declared, kinds[declared.name]) for declared in fields(settings)}


def from_file(path: Path, known: Mapping[str, Option]) -> dict[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            str(path), type(error).__name__, f"must be a readable TOML file: {error}", source="file"
        ) from error
    for key, value in content.items():
        if key not in known:
            raise ConfigError(key, value, _suggestion(key, list(known)), source=str(path))
    return {key: known[key].parse(value, source=str(path)) for key, value in content.items()}


def from_environ(environ: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, object]:
    by_variable = {each.variable: each for each in known.values()}
    found: dict[str, object] = {}
    for variable, raw in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in by_variable:
            raise ConfigError(variable, raw, _suggestion(variable, list(by_variable)), source="environment")
        known_option = by_variable[variable]
        found[known_option.name] = known_option.parse(raw, source=f"variable {variable}")
    return found


def _option_of(declared: Field[Any], kind: Any) -> Option:
    arms = [arm for arm in typing.get_args(kind) if arm is not types.NoneType]
    is_optional = types.NoneType in typing.get_args(kind)
    assert declared.default is not MISSING
    kind = arms[0] if is_optional else typing.get_origin(kind) if typing.get_origin(kind) is tuple else kind
    return Option(declared.name, declared.metadata["rule"], declared.default, kind, is_optional)


def _suggestion(key: str, names: list[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    return f"no such option; did you mean {close[0]}?" if close else f"no such option; allowed: {', '.join(names)}"


def _whole(number: float) -> int:
    if number != int(number):
        raise ValueError("not whole")
    return int(number)


def _texts(raw: object) -> tuple[str, ...]:
    """A list as the file or repeated flags have it, or text with commas, as variables have it."""
    words = [raw] if isinstance(raw, str) else raw
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise TypeError("no list of texts")
    return tuple(part.strip() for word in words for part in word.split(",") if part.strip())
