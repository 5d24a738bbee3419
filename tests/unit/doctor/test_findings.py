"""Findings of several ranks become rows that name hosts and ranks."""

from ngpt_train.doctor.examination import with_host_names
from ngpt_train.doctor.findings import OK, WARNING, WRONG, Finding, different, in_words, merged
from tests.unit.doctor.places import answers, hosts


def test_the_odd_one_is_named() -> None:
    """Caught: the majority is named as the odd one; a host is called a rank."""
    places = hosts(3, 2)
    found = answers(
        places, {"torch": "2.13"}, {"torch": "2.13"}, {"torch": "2.12"}, {"torch": "2.12"}, {"torch": "2.13"}
    )
    usual, others = different(found, "torch")
    assert usual == "2.13"
    assert {value: in_words(where, places) for value, where in others.items()} == {"2.12": "b"}
    assert in_words([places[2]], places) == "b rank 2"
    assert in_words([places[2], places[3], places[5]], places) == "b; c rank 5"
    assert in_words(places, places) == ""


def test_of_two_rank_0_counts() -> None:
    assert different(answers(hosts(2), {"torch": "2.12"}, {"torch": "2.13"}), "torch")[0] == "2.12"


def test_containers_with_one_host_name_are_told_apart() -> None:
    places = [place.__class__(**vars(place) | {"host": "localhost"}) for place in hosts(2)]
    assert [place.host for place in with_host_names(places)] == ["localhost (node 0)", "localhost (node 1)"]


def test_rows_are_merged() -> None:
    """Caught: a row for each of a thousand ranks; an `ok` that hides a fault; an `ok` beside a fault of all ranks."""
    places = hosts(2, 2)
    fine = [Finding("files", f"at most {n}", OK, where=(place,)) for n, place in enumerate(places[:3])]
    faulty = [Finding("files", "at most 9", WRONG, "mend it", where=(places[3],))]
    rows = merged([*fine, *faulty], places)
    assert [(row.verdict, in_words(row.where, places)) for row in rows] == [(WRONG, "b rank 3"), (OK, "a; b rank 2")]
    all_faulty = [Finding("files", "at most 9", WARNING, "mend it", where=(place,)) for place in places]
    assert [(row.verdict, row.where) for row in merged([*fine, *all_faulty], places)] == [(WARNING, ())]


def test_different_rows_of_one_check_stay() -> None:
    """Caught: of two sources of a mixture, both `ok`, only the first one is shown."""
    places = hosts(2)
    rows = [
        Finding("data", f"source {name}: {n} files, {size}", OK, where=(place,))
        for place, n, size in zip(places, (2, 3), ("9.5 MB", "900 bytes"), strict=True)
        for name in "ab"
    ]
    assert [(row.found, row.where) for row in merged(rows, places)] == [
        ("source a: 2 files, 9.5 MB", ()),
        ("source b: 2 files, 9.5 MB", ()),
    ]
