from hypothesis import given
from hypothesis import strategies as st

from rose.rl.sampling import to_begin


def test_first_what_is_wanted_then_one_for_each_that_is_of_no_use() -> None:
    assert to_begin(wanted=16, useless=0, begun=0, most=80) == 16
    assert to_begin(wanted=16, useless=3, begun=16, most=80) == 3
    assert to_begin(wanted=16, useless=3, begun=19, most=80) == 0


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_whoever_ends_first_the_same_groups_are_begun(
    wanted: int, factor: int, data: st.DataObject
) -> None:
    """The groups of a step are the first of an endless list that hold what is wanted."""
    most = wanted * factor
    of_use = data.draw(st.lists(st.booleans(), min_size=most, max_size=most))
    begun = useless = 0
    running: list[int] = []
    while more := to_begin(wanted, useless, begun, most):
        running += range(begun, begun + more)
        begun += more
        while running:
            ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
            useless += not of_use[ended]
            if to_begin(wanted, useless, begun, most):
                break
    enough = (i + 1 for i in range(most) if sum(of_use[: i + 1]) == wanted)
    assert begun == next(enough, most)
