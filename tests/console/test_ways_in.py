"""What every daemon and command does with a Redis that refuses it: one sentence and status 2, never a traceback.

Real `redis-server` processes; the command line runs in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import click
import pytest

import mtplx
from broker.connection.connect import connect
from broker.connection.rights import acl_rules, missing_rights
from broker.errors import BrokerUnavailableError
from broker.former.daemon import Former, FormerConfig
from console.supervisor import EXIT_CONFIG
from harness.redis_servers import ChildServer, child_server
from harness.stack import connection, free_port
from harness.tls import make_certificates

DAEMONS = ("former", "worker", "api", "batch-worker")
CALLS: Mapping[str, str | None] = {
    **dict.fromkeys(DAEMONS, ""),
    **dict.fromkeys(("up", "status", "top", "dead list"), ""),
    "run": "{folder}/prompts.txt.jsonl -o {folder}/out.jsonl",
    **dict.fromkeys(("dead show", "dead requeue", "dead drop"), "a-letter"),
    "doctor": None,  # shows what Redis says as a finding, see below
    **dict.fromkeys((f"batch {each}" for each in ("submit", "status", "wait", "cancel", "fetch")), None),
}
"""Every command that takes --redis, with its arguments; None where it asks no Redis, or does not end over it."""

RULES = acl_rules()


def commands_with_redis(group: click.Group, prefix: str = "") -> Iterator[str]:
    """Names of all commands with the option --redis."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands_with_redis(command, f"{prefix}{name} ")
        elif any(parameter.name == "redis" for parameter in command.params):
            yield f"{prefix}{name}"


class Refusing:
    """Servers that refuse in one way each."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._with_users: ChildServer | None = None

    def url(self, kind: str) -> str:
        """The URL of one that refuses like this."""
        match kind:
            case "wrong authority":
                return self._tls_url()
            case "eviction":
                return self._server("--maxmemory-policy", "allkeys-lru").url
            case "cluster":
                return self._server("--cluster-enabled", "yes", "--port", str(free_port())).url
        if self._with_users is None:
            self._with_users = self._server("--requirepass", "secret-word", "--enable-debug-command", "no")
            with connection(self._of("", "secret-word")) as admin:
                for user, changes in USERS.items():
                    admin.execute_command("ACL", "SETUSER", user, "on", ">secret-word", *RULES, *changes)
        return {
            "no password": self._with_users.url,
            "wrong password": self._of("", "another-secret-word"),
            "unknown user": self._of("nobody", "secret-word"),
        }.get(kind) or self._of(kind, "secret-word")

    def _of(self, user: str, password: str) -> str:
        assert self._with_users is not None
        return self._with_users.url.replace("unix://", f"unix://{user}:{password}@")

    def _server(self, *words: str) -> ChildServer:
        return self._stack.enter_context(child_server("redis", words=words))

    def _tls_url(self) -> str:
        ours, another = make_certificates(self._folder / "ours"), make_certificates(self._folder / "another")
        port = free_port()
        files = ("--tls-cert-file", str(ours.certificate), "--tls-key-file", str(ours.key))
        self._server("--tls-port", str(port), *files, "--tls-ca-cert-file", str(ours.authority))
        return f"rediss://127.0.0.1:{port}?ssl_ca_certs={another.authority}"


USERS: Mapping[str, tuple[str, ...]] = {
    "without-xadd": ("-xadd",),
    "without-scripts": ("-evalsha", "-script|load"),
    "without-multi": ("-multi",),
    "without-subscribe": ("-subscribe",),
    "without-batches": ("resetkeys", "~{mtplx}:*"),
    "without-channels": ("resetchannels",),
    "without-info": ("-info",),
}
"""ACL users that lack something."""
SAID = {
    "no password": "MTPLX_REDIS=redis://USER:PASSWORD@HOST",
    "wrong password": "MTPLX_REDIS=redis://USER:PASSWORD@HOST",
    "unknown user": "MTPLX_REDIS=redis://USER:PASSWORD@HOST",
    "without-xadd": "'+xadd'",
    "without-scripts": "'+evalsha' '+script|load'",
    "without-multi": "'+multi'",
    "without-subscribe": "'+subscribe'",
    "without-batches": "'~rq:*'",
    "without-channels": "'&{mtplx}:*' '&rq:*'",
    "without-info": "+info",
    "wrong authority": "certificate verify failed",
    "eviction": "allowed: noeviction",
    "cluster": "one primary that is in no cluster",
}
"""What the sentence must name."""


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs by kind of refusal."""
    with ExitStack() as stack:
        servers = Refusing(stack, tmp_path_factory.mktemp("certificates"))
        yield {kind: servers.url(kind) for kind in SAID}


def run(*words: str) -> int | str | None:
    """Run one command line here; its exit status."""
    with pytest.raises(SystemExit) as ended:
        mtplx.main(words)
    return ended.value.code


def test_every_command_that_takes_redis_is_known_here() -> None:
    assert set(commands_with_redis(mtplx.cli)) == set(CALLS)


@pytest.mark.parametrize("command", [name for name, words in CALLS.items() if words is not None])
def test_command_refuses_a_wrong_password_in_one_sentence(
    refusing: dict[str, str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt.jsonl").write_text('"hello"\n')
    words = (CALLS[command] or "").format(folder=tmp_path).split()

    status = run(*command.split(), *words, "--redis", refusing["wrong password"])

    told = capsys.readouterr().err
    assert status == EXIT_CONFIG
    assert SAID["wrong password"] in told
    assert [line for line in told.splitlines() if line.strip()] == [told.strip()]
    assert "secret-word" not in told


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("daemon", DAEMONS)
def test_daemon_refuses_in_one_sentence_that_says_what_to_do(
    refusing: dict[str, str],
    daemon: str,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    status = run(daemon, "--redis", refusing[kind])

    told = capsys.readouterr().err
    assert status == EXIT_CONFIG, told
    assert SAID[kind] in told
    assert told.startswith("mtplx: ")
    assert len(told.strip().splitlines()) == 1
    assert "Traceback" not in caplog.text
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize("kind", ["wrong password", "without-info", "wrong authority"])
def test_doctor_shows_a_refusal_as_a_finding(
    refusing: dict[str, str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run("doctor", "--redis", refusing[kind])

    told = capsys.readouterr()
    assert status == 1
    assert SAID[kind] in told.out
    assert "Traceback" not in told.out + told.err


@pytest.mark.parametrize("missing", [rule for rule in RULES if rule.startswith("+")])
def test_each_right_is_named_by_itself_when_it_is_missing(missing: str, user_server: ChildServer) -> None:
    with connection(user_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "short", "reset", "on", ">pw", *RULES, missing.replace("+", "-"))

    assert named_by(user_server.url.replace("unix://", "unix://short:pw@")) <= {missing}


@pytest.fixture(scope="module")
def user_server() -> Iterator[ChildServer]:
    with child_server("redis") as server:
        yield server


def named_by(url: str) -> set[str]:
    """The rights that a daemon asks for at its start; empty where those are seen only in use."""

    async def ask() -> set[str]:
        client = connect(url)
        try:
            return set(await missing_rights(client))
        finally:
            await client.aclose()

    return asyncio.run(ask())


async def test_former_that_has_worked_waits_while_a_right_is_taken_away(user_server: ChildServer) -> None:
    with connection(user_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "working", "reset", "on", ">pw", *RULES)
        url = user_server.url.replace("unix://", "unix://working:pw@")
        commands, blocking = connect(url), connect(url, blocking=True)
        former = Former(FormerConfig(redis_url=url), commands=commands, blocking=blocking)
        await former.step()

        admin.execute_command("ACL", "SETUSER", "working", "-smembers")
        with pytest.raises(BrokerUnavailableError, match=r"ACL SETUSER NAME \+smembers"):
            await former.step()
        admin.execute_command("ACL", "SETUSER", "working", "+smembers")

        await former.step()
        assert former.is_working
        await commands.aclose()
        await blocking.aclose()
