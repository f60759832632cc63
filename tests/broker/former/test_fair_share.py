"""Fairness between API keys by tokens. Engine: none; Redis: none."""

from __future__ import annotations

from broker.former.fair_share import FairShare


def test_shares_let_the_key_with_less_go_first() -> None:
    shares = FairShare()

    shares.charge("a", 100)
    shares.charge("b", 10)

    assert shares.start("b") < shares.start("a")


def test_shares_give_two_busy_keys_the_same_tokens() -> None:
    shares, given = FairShare(), {"long": 0, "short": 0}

    for _ in range(1100):
        key_id, cost = min((("long", 100), ("short", 10)), key=lambda each: shares.start(each[0]))
        shares.charge(key_id, cost)
        given[key_id] += cost

    assert abs(given["long"] - given["short"]) <= 100


def test_shares_do_not_let_an_absent_key_save_up() -> None:
    shares = FairShare()
    for _ in range(100):
        shares.charge("busy", 10)

    shares.charge("back", 10)

    assert shares.start("busy") <= shares.start("back")


def test_shares_do_not_make_a_key_pay_for_its_past() -> None:
    shares = FairShare()
    shares.charge("once", 1_000)
    for _ in range(300):
        shares.charge("busy", 10)

    assert shares.start("once") <= shares.start("busy")


def test_shares_are_unchanged_when_their_copy_is_charged() -> None:
    shares = FairShare()

    shares.copy().charge("a", 100)

    assert shares.start("a") == 0


def test_shares_forget_keys_that_owe_nothing() -> None:
    shares = FairShare()

    for i in range(5_000):
        shares.charge(f"key{i}", 1)

    assert len(shares._finish) <= 1025
