"""Seats: slots, holes and the host's bounds on rows in flight. Runs on no engine."""

from __future__ import annotations

from mtplx_core.engine import Row, RowCycle
from mtplx_core.mtp.slots import Slot, Slots


def seat(name: str = "r", *, max_tokens: int = 10, tokens: int = 0) -> Slot:
    return Slot(Row(name, (1, 2, 3), max_tokens), list(range(tokens)))


def seats_of(names: str) -> Slots:
    """Seats named by letters; a dot is a hole."""
    seats = Slots()
    for slot, name in enumerate(names):
        seats.put(slot, seat(name))
    for _, made in list(seats):
        if made.row.row_id == ".":
            seats.remove(made)
    return seats


def names(seats: Slots) -> str:
    found = {slot: made.row.row_id for slot, made in seats}
    return "".join(found.get(slot, ".") for slot in range(seats.width))


def test_seats_fill_the_first_hole_before_growing() -> None:
    assert seats_of("ab.d.").free_slot() == 2
    assert seats_of("ab").free_slot() == 2


def test_closing_holes_moves_seats_from_the_end() -> None:
    seats = seats_of(".b.de")

    moves = seats.close_holes()

    assert names(seats) == "ebd"
    assert moves == [(4, 0), (3, 2)]


def test_closing_holes_drops_an_empty_end_without_moves() -> None:
    seats = seats_of("ab..")

    assert seats.close_holes() == []
    assert names(seats) == "ab"


def test_removed_seat_is_marked_so_that_its_cycle_in_flight_is_dropped() -> None:
    seats = seats_of("ab")
    found = seats.find("a")
    assert found is not None

    seats.remove(found)

    assert found.has_left
    assert seats.find("a") is None
    assert seats.taken == 1


def test_seat_is_finishing_once_what_is_in_flight_must_fill_it() -> None:
    row = seat(max_tokens=5, tokens=3)
    assert not row.is_finishing

    row.in_flight.append(2)
    assert not row.is_finishing

    row.in_flight.append(2)
    assert row.is_finishing


def test_seat_bounds_its_length_by_all_positions_in_flight() -> None:
    row = seat(tokens=4)
    row.in_flight += [3, 2]

    assert row.longest == 3 + 4 - 1 + 5


def test_seat_counts_acceptance_by_place_and_the_widths_it_saw() -> None:
    row = seat()

    row.count_cycle(RowCycle(4, 2, 1))
    row.count_cycle(RowCycle(2, 1, 0))
    row.count_cycle(RowCycle(3, 0, 0))

    stats = row.stats
    assert (stats.cycles, stats.drafted, stats.accepted) == (3, (2, 1), (1, 0))
    assert (stats.min_width, stats.max_width) == (2, 4)
