"""Who takes what is for whom, where some are gone."""

from collections import Counter

from m2flow.comm._homes import Homes

NAMES = [f"w{index}" for index in range(16)]


def test_keys_are_spread_over_all_consumers_and_stay_where_they_are() -> None:
    homes = Homes(NAMES)
    keys = [f"k{index}" for index in range(1600)]
    first = {key: homes.of(key) for key in keys}
    counts = Counter(first.values())
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 150
    homes.share_out(NAMES[:3])
    assert {key: homes.of(key) for key in keys} == first


def test_one_inherits_all_that_is_for_one_who_is_gone() -> None:
    homes = Homes(NAMES)
    for gone in NAMES:
        homes.share_out(set(NAMES) - {gone})
        heir = homes.taker_of[gone]
        assert heir != gone
        assert homes.taken_by[gone] == []
        assert set(homes.taken_by[heir]) == {heir, gone}
        assert all(homes.taken_by[name] == [name] for name in set(NAMES) - {gone, heir})


def test_several_who_are_gone_have_several_heirs_and_another_death_moves_what_that_one_had() -> None:
    homes = Homes(NAMES)
    living = set(NAMES[8:])
    homes.share_out(living)
    before = dict(homes.taker_of)
    heirs = {before[name] for name in set(NAMES) - living}
    assert len(heirs) > 2
    for gone in heirs:
        homes.share_out(living - {gone})
        assert all(before[home] in (gone, taker) for home, taker in homes.taker_of.items())
        assert gone not in homes.taker_of.values()


def test_who_takes_depends_on_nothing_but_who_lives() -> None:
    homes = Homes(NAMES)
    for living in (NAMES[:1], NAMES[3:5], [], NAMES[1:2], NAMES[4:]):
        homes.share_out(living)
    fresh = Homes(NAMES)
    fresh.share_out(NAMES[4:])
    assert homes.taker_of == fresh.taker_of
    homes.share_out(NAMES)
    assert homes.taken_by == {name: [name] for name in NAMES}
