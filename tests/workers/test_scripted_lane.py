"""The lane without a model. Engine: scripted; Redis: none."""

from __future__ import annotations

from tokenizers import Tokenizer

from broker.text.token_bytes import byte_table, text_of
from mtplx_core.engine import Geometry, Row
from mtplx_core.engines.scripted import scripted_completion
from workers.config import ScriptConfig
from workers.scripted_lane import EOS_TOKEN_ID, VOCAB_SIZE, ScriptedLane, encode_text, script_of, tokenizer_files

TEXT = "Hé, 12 \N{SNOWMAN}\n\t~"


def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())


def test_tokenizer_gives_every_byte_a_token() -> None:
    encoded = tokenizer().encode(TEXT, add_special_tokens=False)

    assert tuple(encoded.ids) == encode_text(TEXT)
    assert tokenizer().decode(encoded.ids) == TEXT


def test_tokenizer_knows_its_special_tokens() -> None:
    encoded = tokenizer().encode("<|turn|>a<|end|>", add_special_tokens=False)

    assert (encoded.ids[0], encoded.ids[-1]) == (1, EOS_TOKEN_ID)


def test_byte_table_covers_the_vocabulary() -> None:
    table = byte_table(tokenizer_files()["tokenizer.json"])

    assert table is not None
    assert len(table) == VOCAB_SIZE == tokenizer().get_vocab_size()
    assert text_of(table, encode_text(TEXT)) == TEXT.encode()


def test_completion_is_readable_text() -> None:
    tokens = scripted_completion(Row("a", encode_text("hello"), 200), script_of(ScriptConfig()))

    text = tokenizer().decode(list(tokens))
    assert len(text) == 200
    assert text.isascii()
    assert text.isprintable()


def test_completion_ends_by_itself_where_the_config_says() -> None:
    tokens = scripted_completion(Row("a", encode_text("hello"), 200), script_of(ScriptConfig(eos_position=3)))

    assert len(tokens) == 4
    assert tokens[-1] == EOS_TOKEN_ID


def test_crash_strikes_only_prompts_that_hold_the_text() -> None:
    [fault] = script_of(ScriptConfig(crash_text="poison")).faults

    assert fault.strikes(Row("a", encode_text("some poison here"), 1))
    assert not fault.strikes(Row("a", encode_text("some food here"), 1))
    assert not fault.strikes(Row("a", encode_text("short"), 1))


def test_lane_builds_an_engine_of_the_geometry_asked_for() -> None:
    geometry = Geometry(decode_batch_max=3, max_context_tokens=50)
    lane = ScriptedLane(ScriptConfig(), geometry)

    assert lane.build().geometry == geometry
    assert lane.describe().max_context_tokens == 50
    lane.release()
