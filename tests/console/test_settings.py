"""Options: where a value comes from, and what is refused. Runs on no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from console.settings import PRESETS, ConfigError, Preset, Settings, as_environ, load, options


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mtplx.toml"


def resolve(directory: Path, flags: Mapping[str, object] | None = None, **environ: str) -> Settings:
    return load(flags or {}, environ=environ, directory=directory)


def test_settings_are_the_defaults_when_nothing_is_given(tmp_path: Path) -> None:
    assert resolve(tmp_path) == Settings()


def test_settings_take_the_file_before_the_default(tmp_path: Path, file: Path) -> None:
    file.write_text("port = 9001\n")

    assert resolve(tmp_path).port == 9001


def test_settings_take_the_variable_before_the_file(tmp_path: Path, file: Path) -> None:
    file.write_text("port = 9001\n")

    assert resolve(tmp_path, MTPLX_PORT="9002").port == 9002


def test_settings_take_the_flag_before_the_variable(tmp_path: Path) -> None:
    assert resolve(tmp_path, {"port": "9003"}, MTPLX_PORT="9002").port == 9003


def test_settings_ignore_a_flag_that_was_not_given(tmp_path: Path) -> None:
    assert resolve(tmp_path, {"port": None}, MTPLX_PORT="9002").port == 9002


@pytest.mark.parametrize("name", list(PRESETS))
def test_settings_take_every_value_of_a_preset(tmp_path: Path, name: str) -> None:
    settings = resolve(tmp_path, {"batching_preset": name})

    assert {each.name: settings[each.name] for each in fields(Preset)} == {
        each.name: getattr(PRESETS[name], each.name) for each in fields(Preset)
    }


def test_settings_take_a_single_option_before_the_preset(tmp_path: Path, file: Path) -> None:
    file.write_text("decode_batch_max = 3\n")

    settings = resolve(tmp_path, {"batching_preset": "throughput"})

    assert (settings.decode_batch_max, settings.batch_wait_ms) == (3, PRESETS["throughput"].batch_wait_ms)


def test_settings_default_to_the_default_preset() -> None:
    defaults = options()

    preset = PRESETS[str(defaults["batching_preset"].default)]

    assert all(defaults[each.name].default == getattr(preset, each.name) for each in fields(Preset))


def test_settings_never_run_a_preset_with_one_row() -> None:
    assert min(preset.decode_batch_max for preset in PRESETS.values()) > 1


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        pytest.param("port", "65536", "a whole number from 0 to 65535", id="above"),
        pytest.param("port", "-1", "a whole number from 0 to 65535", id="below"),
        pytest.param("port", "1.5", "a whole number", id="not-whole"),
        pytest.param("port", "", "a whole number", id="empty"),
        pytest.param("scheduler_mode", "fast", "serial, ar_batch, mtp_batch", id="not-a-choice"),
        pytest.param("share", "maybe", "true or false", id="not-a-truth"),
        pytest.param("offline_share", "nan", "a number from 0 to 1", id="not-a-number"),
        pytest.param("offline_share", "2", "a number from 0 to 1", id="share-above"),
        pytest.param("host", "", "text", id="empty-text"),
    ],
)
def test_settings_name_key_value_and_what_is_allowed_when_they_refuse(
    tmp_path: Path, name: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load({}, environ={f"MTPLX_{name.upper()}": value}, directory=tmp_path)

    assert f"variable MTPLX_{name.upper()}: {name} = {value!r}" in str(refusal.value)
    assert allowed in str(refusal.value)


@pytest.mark.parametrize("content", ["port = true", 'port = "x"', "port = [1]", "host = 3", "port = 80.5"])
def test_settings_refuse_a_value_of_another_type_in_the_file(tmp_path: Path, file: Path, content: str) -> None:
    file.write_text(content)

    with pytest.raises(ConfigError, match=r"mtplx\.toml: (port|host) = "):
        resolve(tmp_path)


def test_settings_refuse_an_unknown_key_and_name_the_nearest(tmp_path: Path, file: Path) -> None:
    file.write_text("prot = 1\n")

    with pytest.raises(ConfigError, match="prot = 1 is refused; no such option; did you mean port?"):
        resolve(tmp_path)


def test_settings_refuse_an_unknown_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean MTPLX_PORT?"):
        resolve(tmp_path, MTPLX_PROT="1")


def test_settings_refuse_a_file_that_is_not_toml(tmp_path: Path, file: Path) -> None:
    file.write_text("port 9001")

    with pytest.raises(ConfigError, match="must be a readable TOML file"):
        resolve(tmp_path)


def test_settings_never_show_a_secret_when_they_refuse(tmp_path: Path, file: Path) -> None:
    file.write_text('redis = ["redis://:hunter2@host"]')

    with pytest.raises(ConfigError) as refusal:
        resolve(tmp_path)

    assert "hunter2" not in str(refusal.value)


def test_settings_survive_the_way_through_the_environment(tmp_path: Path) -> None:
    settings = resolve(tmp_path, {"batching_preset": "latency", "share": True, "data_dir": "/x y", "model": "a/b"})

    environ = as_environ(settings, {"PATH": "/bin", "MTPLX_PORT": "1"})

    assert load({}, environ=environ, directory=tmp_path) == settings
    assert environ["PATH"] == "/bin"


def test_options_spell_flag_variable_and_key_alike() -> None:
    option = options()["batch_wait_ms"]

    assert (option.flag, option.variable, option.name) == ("--batch-wait-ms", "MTPLX_BATCH_WAIT_MS", "batch_wait_ms")


@pytest.mark.parametrize(
    ("flags", "environ", "content", "expected"),
    [
        pytest.param({"allow_host": ("a", "b")}, {}, "", ("a", "b"), id="repeated flags"),
        pytest.param({"allow_host": ("a,b",)}, {}, "", ("a", "b"), id="a flag with commas"),
        pytest.param({"allow_host": ()}, {"MTPLX_ALLOW_HOST": "a, b,"}, "", ("a", "b"), id="a variable"),
        pytest.param({}, {"MTPLX_ALLOW_HOST": ""}, 'allow_host = "c"', (), id="an empty variable"),
        pytest.param({}, {}, 'allow_host = ["a", "b"]', ("a", "b"), id="a list in the file"),
        pytest.param({}, {}, 'allow_host = "a"', ("a",), id="a text in the file"),
    ],
)
def test_settings_take_a_list_wherever_it_comes_from(
    tmp_path: Path,
    file: Path,
    flags: Mapping[str, object],
    environ: dict[str, str],
    content: str,
    expected: tuple[str, ...],
) -> None:
    file.write_text(content)

    settings = resolve(tmp_path, flags, **environ)

    assert settings.allow_host == expected
    assert load({}, environ=as_environ(settings, {}), directory=tmp_path) == settings


@pytest.mark.parametrize("content", ["allow_origin = 3", "allow_origin = [1]", "allow_origin = true"])
def test_settings_refuse_a_list_that_is_none(tmp_path: Path, file: Path, content: str) -> None:
    file.write_text(content)

    with pytest.raises(ConfigError, match="allowed: a list of texts"):
        resolve(tmp_path)
