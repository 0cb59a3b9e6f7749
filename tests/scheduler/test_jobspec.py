"""Jobs on the command line: what may be said, and what is said to what may not."""

from __future__ import annotations

import pytest

from rose.scheduler.jobspec import parse


def test_a_name_is_enough() -> None:
    job = parse("math").job
    assert (job.name, job.share, job.max_staleness, job.per_version) == ("math", 1.0, None, None)
    assert parse("math").source is None


def test_all_of_it() -> None:
    spec = parse(
        "math,share=2.5,most_running=64,max_borrowed=3,max_staleness=1,per_version=256,"
        "weights=tcp://h:1"
    )
    job = spec.job
    assert (job.share, job.most_running, job.max_borrowed) == (2.5, 64, 3)
    assert (job.max_staleness, job.per_version) == (1, 256)
    assert spec.source is not None
    assert spec.source[:2] == ("tcp://h:1", "math")
    assert spec.source.folder.endswith("rose-weights/math")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "''"),
        ("a/b", "'a/b'"),
        ("a,share", "'share'"),
        ("a,share=0", "share"),
        ("a,share=many", "share"),
        ("a,share=1,share=2", "twice"),
        ("a,most_running=0", "most_running"),
        ("a,max_borrowed=-1", "max_borrowed"),
        ("a,max_staleness=-1", "max_staleness"),
        ("a,per_version=0", "per_version"),
        ("a,shares=1", "shares"),
        ("a,weights=nowhere", "store 'nowhere' is not"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)
