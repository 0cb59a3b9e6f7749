"""What Prometheus is told of leases, versions and placements."""

from __future__ import annotations

from prometheus_client import generate_latest

from rose.scheduler.core import Scheduler
from rose.scheduler.fleet import Engine
from rose.scheduler.job import Job
from rose.scheduler.lease import Word
from rose.scheduler.nodes import Nodes
from rose.scheduler.status import Exported


def test_leases_and_versions_are_exported() -> None:
    core = Scheduler()
    core.jobs = {"a": Job("a"), "b": Job("b")}
    nodes = Nodes(core, most_borrowed=1)
    for name, offered in (("n1", True), ("n2", False)):
        word = Word(0.0, active=False, offered=offered, load=0.0, memory=1.0)
        nodes.heard(name, f"http://{name}", dedicated=False, word=word)
    core.join(Engine("own", "", version="5", jobs=frozenset({"a"})), 0.0)
    core.join(Engine("lost", "", version="default"), 0.0)
    core.jobs["a"].lead(7)
    told = generate_latest(Exported(core, nodes).registry).decode()
    assert 'rose_scheduler_devices{lease="dormant"} 1.0' in told
    assert 'rose_scheduler_devices{lease="taken back"} 1.0' in told
    assert 'rose_scheduler_versions_behind{engine="own",job="a"} 2.0' in told
    assert told.count("rose_scheduler_versions_behind{") == 1
