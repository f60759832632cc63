"""Parts of a batch's answers, and the files made of them, on a disk and in fsspec's memory. Runs on no engine."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from api.batch.file_store import FileStore
from api.batch.parts import Kind, LineCounts, Parts, Result
from api.errors import ApiConfigError


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    return FileStore(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}")


def result(number: int, kind: Kind = "output", *, tokens: int = 2) -> Result:
    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
    record = {"id": f"batch_req_x-{number}", "custom_id": str(number), "response": {"body": {"usage": usage}}}
    return Result(number, kind, json.dumps(record).encode() + b"\n")


def joined(parts: Parts, tally: LineCounts, kind: Kind = "output") -> list[int]:
    file = io.BytesIO()
    size = parts.join(kind, tally, file)
    lines = file.getvalue().splitlines(keepends=True)
    assert size == sum(map(len, lines))
    return [int(json.loads(line)["custom_id"]) for line in lines]


def test_new_runner_knows_what_others_have_written(store: FileStore) -> None:
    Parts(store, "b", "first").write([result(1), result(3, "error")])
    Parts(store, "b", "second").write([result(2, tokens=5)])

    tally = Parts(store, "b", "third").tally()

    assert [tally.has(number) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert tally.fields == {"completed": 2, "failed": 1, "input_tokens": 3, "output_tokens": 9}


def test_line_written_by_two_runners_is_in_the_files_once(store: FileStore) -> None:
    Parts(store, "b", "first").write([result(1), result(2)])
    Parts(store, "b", "second").write([result(2), result(3)])
    Parts(store, "b", "second").write([result(3, "error")])
    parts, tally = Parts(store, "b", "third"), LineCounts()

    output, errors = joined(parts, tally), joined(parts, tally, "error")

    assert (sorted(output), errors) == ([1, 2, 3], [])
    assert tally.fields["completed"] == 3


def test_half_a_line_of_a_killed_runner_counts_for_nothing(store: FileStore) -> None:
    Parts(store, "b", "first").write([result(1), result(2)._replace(data=result(2).data[:20])])

    tally = Parts(store, "b", "second").tally()

    assert (tally.has(1), tally.has(2)) == (True, False)


def test_parts_of_another_batch_are_not_read(store: FileStore) -> None:
    Parts(store, "b", "first").write([result(1)])

    assert joined(Parts(store, "c", "first"), LineCounts()) == []


def test_deleted_parts_are_gone(store: FileStore) -> None:
    parts = Parts(store, "b", "first")
    parts.write([result(1)])

    parts.delete()

    assert joined(parts, LineCounts()) == []


def test_content_comes_back_and_goes(store: FileStore) -> None:
    store.write("files/a", b"content")

    with store.open("files/a") as file:
        assert file.read() == b"content"
    assert store.size("files/a") == 7
    store.delete("files/a")
    store.delete("files/a")
    with pytest.raises(FileNotFoundError):
        store.open("files/a")


def test_place_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ApiConfigError, match="nonsense://x"):
        FileStore("nonsense://x")
