from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.executor.latency import MIN_MARGIN, QUANTILE, WINDOW, Profile, Step, Tracker, fit

TRUE = Profile("m", "d", 0.02, 0.0004, 0.003, 2e-6, margin=1.1, error=0.0)


def random_step(rng: random.Random) -> Step:
    return Step(rng.choice([0, 0, 8, 64, 400]), rng.randint(1, 32), rng.randint(0, 20_000))


def measured(rng: random.Random, count: int, slower: float = 1.0) -> list[tuple[Step, float]]:
    """Steps with their times: the true line with 5 % of noise."""
    steps = [random_step(rng) for _ in range(count)]
    return [(step, TRUE.mean(step) * slower * rng.gauss(1.0, 0.05)) for step in steps]


def test_fit_finds_the_line() -> None:
    found = fit("m", "d", measured(random.Random(1), 400))
    assert found.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.1)
    assert found.per_prefill_s == pytest.approx(TRUE.per_prefill_s, rel=0.1)
    assert found.per_decode_s == pytest.approx(TRUE.per_decode_s, rel=0.1)
    assert found.per_context_s == pytest.approx(TRUE.per_context_s, rel=0.1)
    assert found.error < 0.06
    assert 1.05 < found.margin < 1.2
    assert found.steps == 400


@given(
    st.lists(
        st.tuples(
            st.builds(Step, st.integers(0, 512), st.integers(1, 64), st.integers(0, 50_000)),
            st.floats(0.0005, 2.0),
        ),
        min_size=8,
        max_size=40,
    )
)
def test_whatever_was_measured_a_longer_step_is_never_predicted_shorter(
    steps: list[tuple[Step, float]],
) -> None:
    found = fit("m", "d", steps)
    coefficients = (
        found.fixed_s,
        found.per_prefill_s,
        found.per_decode_s,
        found.per_context_s,
    )
    assert all(math.isfinite(c) and c >= 0 for c in coefficients)
    assert found.margin >= MIN_MARGIN


def test_a_profile_of_too_few_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 measured steps, got 7"):
        fit("m", "d", measured(random.Random(1), 7))


def test_an_empty_step_takes_no_time() -> None:
    assert TRUE.mean(Step(0, 0, 500)) == 0.0


def test_the_bound_covers_its_share_of_steps_never_seen() -> None:
    rng = random.Random(2)
    profile = fit("m", "d", measured(rng, 600))
    tracker = Tracker(profile)
    for step, seconds in measured(rng, WINDOW):
        tracker.observe(step, seconds)
    fresh = measured(rng, 2000)
    covered = sum(seconds <= tracker.upper(step) for step, seconds in fresh) / len(fresh)
    assert covered > QUANTILE - 0.015
    assert all(tracker.upper(step) < 1.5 * TRUE.mean(step) for step, _ in fresh)


@pytest.mark.parametrize("quantile", [0.5, 0.95])
def test_a_lower_quantile_is_a_tighter_bound(quantile: float) -> None:
    rng = random.Random(2)
    tracker = Tracker(TRUE, quantile)
    for step, seconds in measured(rng, WINDOW):
        tracker.observe(step, seconds)
    fresh = measured(rng, 2000)
    covered = sum(seconds <= tracker.upper(step) for step, seconds in fresh) / len(fresh)
    assert covered == pytest.approx(max(quantile, 0.66), abs=0.05)  # 2 %, at least, are kept


def test_the_bound_follows_a_slower_phase() -> None:
    rng = random.Random(3)
    tracker = Tracker(fit("m", "d", measured(rng, 600)))
    for step, seconds in measured(rng, WINDOW):
        tracker.observe(step, seconds)
    before = tracker.coverage
    slow = measured(rng, WINDOW, slower=1.5)
    missed = 0
    for step, seconds in slow:
        missed += seconds > tracker.upper(step)
        tracker.observe(step, seconds)
    assert before > 0.97
    assert missed < 20
    assert tracker.error == pytest.approx(0.5, abs=0.1)
    later = measured(rng, 1000, slower=1.5)
    assert sum(s <= tracker.upper(step) for step, s in later) / 1000 > QUANTILE - 0.015
    assert tracker.mean(Step(0, 8, 0)) == pytest.approx(1.5 * TRUE.mean(Step(0, 8, 0)), rel=0.1)


def test_the_bound_comes_back_after_a_slower_phase() -> None:
    rng = random.Random(4)
    tracker = Tracker(TRUE)
    for step, seconds in [*measured(rng, WINDOW, slower=3.0), *measured(rng, WINDOW)]:
        tracker.observe(step, seconds)
    assert tracker.margin < 1.3


def test_the_fixed_part_is_corrected_on_its_own() -> None:
    """Two engines on one device: what every step loads anew takes longer, tokens do not."""
    rng = random.Random(5)
    profile = fit("m", "d", measured(rng, 600))
    cold = replace(TRUE, fixed_s=1.8 * TRUE.fixed_s)
    tracker = Tracker(profile)
    for _ in range(2 * WINDOW):
        step = Step(rng.choice([0, 0, 0, 8, 100]), rng.randint(1, 16), 0)
        tracker.observe(step, cold.mean(step) * rng.gauss(1.0, 0.03))
    for step in (Step(0, 1, 0), Step(0, 16, 0), Step(400, 4, 0)):
        assert tracker.mean(step) == pytest.approx(cold.mean(step), rel=0.06)
        assert tracker.upper(step) < 1.2 * cold.mean(step)


@given(st.lists(st.tuples(st.integers(0, 512), st.integers(1, 64), st.floats(1e-4, 10.0))))
def test_whatever_is_observed_a_longer_step_is_never_bounded_shorter(
    seen: list[tuple[int, int, float]],
) -> None:
    tracker = Tracker(TRUE)
    for prefill, decode, seconds in seen * 3:
        tracker.observe(Step(prefill, decode, 0), seconds)
    steps = [Step(0, 1, 0), Step(0, 2, 0), Step(1, 2, 0), Step(400, 2, 0), Step(400, 2, 9000)]
    bounds = [tracker.upper(step) for step in steps]
    assert bounds == sorted(bounds) and 0 < bounds[0] < math.inf


def test_few_lucky_steps_do_not_tighten_the_bound() -> None:
    tracker = Tracker(TRUE)
    for _ in range(10):
        tracker.observe(Step(0, 8, 0), TRUE.mean(Step(0, 8, 0)) * 0.5)
    assert tracker.margin == TRUE.margin


def test_steps_without_tokens_or_time_are_not_observed() -> None:
    tracker = Tracker(TRUE)
    tracker.observe(Step(0, 0, 9), 1.0)
    tracker.observe(Step(0, 1, 9), 0.0)
    assert (tracker.coverage, tracker.error, tracker.margin) == (1.0, 0.0, TRUE.margin)


MOST = 1 << 20
profiles = st.builds(
    Profile,
    st.just("m"),
    st.just("d"),
    fixed_s=st.floats(0, 0.1),
    per_prefill_s=st.floats(1e-6, 0.01),
    per_decode_s=st.floats(0, 0.01),
    per_context_s=st.floats(0, 1e-5),
    margin=st.floats(1.0, 3.0),
    error=st.just(0.0),
)


@given(profiles, st.floats(-1, 60), st.integers(0, 64), st.integers(0, 10_000))
def test_within_is_the_inverse_of_the_bound(
    profile: Profile, seconds: float, decode: int, context: int
) -> None:
    tracker = Tracker(profile)
    tokens = tracker.within(seconds, context).tokens(decode, MOST)
    if seconds <= 0:
        assert tokens == 0
        return
    part = tokens < decode  # of the batch, without prompts
    step = Step(0, tokens, context) if part else Step(tokens - decode, decode, context)
    more = Step(0, tokens + 1, context) if part else Step(tokens - decode + 1, decode, context)
    if tokens:
        assert tracker.upper(step) <= seconds
    if tokens - decode < MOST:
        assert tracker.upper(more) > seconds * (1 - 1e-8)


@given(profiles, st.integers(1, 2000), st.integers(0, 64))
def test_exactly_the_time_of_a_step_is_not_much_too_short(
    profile: Profile, tokens: int, decode: int
) -> None:
    tracker = Tracker(profile)
    step = Step(tokens, decode, 0)
    fit = tracker.within(tracker.upper(step), 0)
    assert fit.tokens(decode, tokens) in (step.tokens - 1, step.tokens)


def test_endless_time_or_free_tokens_set_no_limit() -> None:
    assert Tracker(TRUE).within(math.inf, 0).tokens(1, MOST) == MOST + 1
    free = Profile("m", "d", 0.01, 0.0, 0.0, 0.0, margin=1.1, error=0.0)
    assert Tracker(free).within(0.02, 0).tokens(1, MOST) == MOST + 1
    assert Tracker(free).within(0.01, 0).tokens(1, MOST) == 0


def test_a_saved_profile_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "m.json"
    TRUE.save(path)
    assert Profile.load(path) == TRUE


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        json.dumps({"model": "m"}),
        json.dumps({**TRUE.__dict__, "color": "red"}),
        json.dumps({**TRUE.__dict__, "fixed_s": "fast"}),
        json.dumps({**TRUE.__dict__, "per_decode_s": -1.0}),
        json.dumps({**TRUE.__dict__, "margin": math.nan}),
    ],
)
def test_a_broken_profile_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"latency profile .*broken\.json"):
        Profile.load(path)


def test_a_missing_profile_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"latency profile .*none\.json"):
        Profile.load(tmp_path / "none.json")
