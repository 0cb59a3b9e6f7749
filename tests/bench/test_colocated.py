"""Which requests count when the machine's host takes CPU time away."""

from rose.bench.colocated import SAMPLE_S, STOLEN_S, Moment, Run
from rose.bench.stats import Sample
from rose.executor.facts import RolloutFacts, ServingFacts


def request(index: int, scheduled: float, finish: float) -> Sample:
    return Sample(index, scheduled, scheduled, finish, 8, 2, (finish - 0.1, finish))


def test_requests_during_a_theft_are_left_out() -> None:
    stolen = [0.0, 0.0, STOLEN_S, STOLEN_S, STOLEN_S * 1.5]
    moments = [
        Moment(i * SAMPLE_S, ServingFacts(), RolloutFacts(), at) for i, at in enumerate(stolen)
    ]
    before, within, around, after = (
        request(0, 0.0, SAMPLE_S),
        request(1, 1.2 * SAMPLE_S, 1.8 * SAMPLE_S),
        request(2, 0.5 * SAMPLE_S, 3 * SAMPLE_S),
        request(3, 2 * SAMPLE_S, 4 * SAMPLE_S),
    )
    run = Run("rose", 1.0, [before, within, around, after], moments=moments)
    assert run.undisturbed == [before, after]
