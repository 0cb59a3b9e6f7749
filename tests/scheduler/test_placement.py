"""Where turns go: the cost, the room, and what each policy is for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.scheduler.facts import EngineFacts, Speed, Standing
from rose.scheduler.placement import (
    POLICIES,
    Placing,
    Reason,
    anew_s,
    has_room,
    place,
    reason,
    wait_s,
)

SPEED = Speed(step_s=0.02, turn_s=0.002, prefill_s=0.001)


def engine(id_: str, **more: object) -> EngineFacts:
    return EngineFacts(**{"id": id_, "speed": SPEED} | more)  # type: ignore[arg-type]


def turn(**more: object) -> Placing:
    return replace(Placing(context=1000, expected=100, cached={}), **more)


def test_a_cached_prefix_draws_a_turn() -> None:
    engines = [engine("a"), engine("b", running=2)]
    assert place("cost", turn(), engines) == engines[0]
    assert place("cost", turn(cached={"b": 900}), engines) == engines[1]


def test_a_busy_engine_loses_its_turns_however_much_it_has_cached() -> None:
    engines = [engine("a"), engine("b", running=60, prefill_left=3000)]
    assert place("cost", turn(cached={"b": 1000}, before="b"), engines) == engines[0]
    assert place("sticky", turn(cached={"b": 1000}, before="b"), engines) == engines[1]


def test_a_device_that_is_often_taken_back_has_to_be_faster() -> None:
    risky = engine("risky", borrowed=True, revoked_per_s=0.2)
    assert place("cost", turn(), [risky, engine("safe")]) == engine("safe")
    faster = replace(risky, speed=Speed(0.004, 0.0004, 0.0002))
    assert place("cost", turn(), [faster, engine("safe")]) == faster


def test_a_long_trajectory_pays_once_to_be_on_a_fast_engine() -> None:
    slow = engine("slow", speed=Speed(0.04, 0.004, 0.002))
    asked = turn(context=3000, cached={"slow": 2900}, before="slow")
    assert place("cost", asked, [slow, engine("fast")]) == slow
    assert place("cost", replace(asked, further=8), [slow, engine("fast")]) == engine("fast")


def test_a_prefill_that_others_wait_for_has_to_gain_more() -> None:
    """The faster engine is worth a prefill, but not one that twenty turns there wait for."""
    slow = engine("slow", running=20, speed=Speed(0.04, 0.001, 0.0005))
    fast = engine("fast", running=0, speed=Speed(0.02, 0.001, 0.0005))
    asked = turn(context=3000, cached={"slow": 2900}, before="slow")
    assert place("cost", asked, [slow, fast]) == fast
    busy = replace(fast, running=20)
    assert place("cost", asked, [slow, busy]) == slow
    assert place("cost", replace(asked, cached={}), [slow, busy]) == busy


def test_only_ready_engines_with_room_get_turns() -> None:
    for standing in Standing:
        found = place("cost", turn(), [engine("a", standing=standing)])
        assert (found is not None) == (standing == Standing.READY)
    full = engine("a", context=9_500, capacity=10_000, running=3)
    assert not has_room(turn(), full)
    assert has_room(turn(), replace(full, context=0, running=0, capacity=500))
    assert not has_room(turn(), engine("a", running=engine("a").slots))


def test_an_engine_gets_one_more_turn_than_it_has_places_or_an_eighth() -> None:
    assert [engine("a", places=places).slots for places in (1, 8, 64)] == [2, 9, 72]
    worth = engine("a", speed=Speed(0.02, 0.002)).slots
    assert worth == engine("a", speed=Speed(0.02, 0.002), places=1000).slots == 90
    assert not has_room(turn(), engine("a", running=9, places=8))


def test_a_turn_waits_for_its_own_engine_unless_others_do_too() -> None:
    full = engine("full", running=9, places=8)
    asked = turn(context=1000, cached={"full": 1000}, before="full", expected=20, crowded=True)
    assert place("cost", asked, [full, engine("free")]) is None
    assert place("cost", replace(asked, crowded=False), [full, engine("free")]) == engine("free")
    assert place("cost", replace(asked, ahead=50), [full, engine("free")]) == engine("free")
    assert place("cost", replace(asked, cached={}), [full, engine("free")]) == engine("free")
    assert place("least_loaded", asked, [full, engine("free")]) == engine("free")
    short_of_memory = replace(full, running=3, context=9_500, capacity=10_000)
    assert place("cost", asked, [short_of_memory, engine("free")]) == engine("free")


def test_in_a_crowd_a_prefill_that_many_would_wait_for_is_not_worth_a_place() -> None:
    full = engine("full", running=9, places=8)
    asked = turn(context=200, cached={"full": 200}, before="full", expected=28, crowded=True)
    asked = replace(asked, ahead=3)
    busy, idle = engine("busy", running=8, places=8), engine("idle")
    assert wait_s(asked, full) > anew_s(asked, busy)
    assert place("cost", asked, [full, busy]) is None
    assert place("cost", asked, [full, idle]) == idle


def test_in_a_crowd_nobody_moves_to_a_faster_engine() -> None:
    slow = engine("slow", speed=Speed(0.04, 0.004, 0.002))
    asked = turn(context=3000, cached={"slow": 2900}, before="slow", further=8)
    assert place("cost", asked, [slow, engine("fast")]) == engine("fast")
    assert place("cost", replace(asked, crowded=True), [slow, engine("fast")]) == slow
    assert place("cost", replace(asked, crowded=True, before="gone"), [slow]) == slow


def test_why_a_turn_went_where_it_went_can_be_told() -> None:
    assert reason(turn(), "a") == Reason.NEW
    had = turn(cached={"a": 900, "b": 900, "c": 100}, before="a")
    told = [reason(had, name) for name in "abcd"]
    assert told == [Reason.STAYED, Reason.PREFIX, Reason.MOVED, Reason.MOVED]
    assert reason(turn(before="gone"), "a") == Reason.MOVED


def test_the_others_do_what_they_say() -> None:
    engines = [engine("a", running=3), engine("b", running=1, borrowed=True), engine("c")]
    assert place("least_loaded", turn(), engines) == engines[2]
    assert [place("round_robin", turn(number=n), engines) for n in range(3)] == engines
    assert place("sticky", turn(before="a"), engines) == engines[0]
    assert place("paper", turn(before="a"), engines) == engines[0]
    assert place("paper", turn(before="gone"), engines) == engines[1]
    crowded = [replace(engines[0], running=16), replace(engines[1], running=16), engines[2]]
    assert place("paper", turn(before="a"), crowded) == crowded[0]
    assert place("paper", turn(before="gone"), crowded) == engines[2]
    four = [crowded[0], replace(crowded[1], gpus=4), engines[2]]
    assert place("paper", turn(before="gone"), four) == four[1]


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.builds(
            EngineFacts,
            id=st.text("abcdef", min_size=1, max_size=3),
            running=st.integers(0, 300),
            standing=st.sampled_from(Standing),
            revoked_per_s=st.floats(0, 10),
            context=st.integers(0, 10_000),
            capacity=st.integers(1, 10_000),
        ),
        max_size=6,
    ),
    st.integers(0, 5000),
)
def test_every_policy_finds_a_place_exactly_if_there_is_one(
    policy: str, engines: list[EngineFacts], context: int
) -> None:
    asked = turn(context=context, before="a")
    found = place(policy, asked, engines)
    roomy = [e for e in engines if has_room(asked, e)]
    if policy == "paper":
        roomy = [e for e in roomy if e.running < 16 or e.id == asked.before]
    assert (found in roomy) if roomy else found is None
