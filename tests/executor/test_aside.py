"""The second thread: order, catching up, bells; and the guard between the two threads.

What it does when something fails is in `test_aside_failures`."""

import threading
import time

from rose.executor.aside import Aside, Guard
from rose.executor.page import Page


def until(true: threading.Event) -> None:
    assert true.wait(20.0)


def test_jobs_run_in_order_and_then_once_it_has_caught_up(lasting_page: Page) -> None:
    done: list[int] = []
    seen: list[int] = []
    hold, caught_up = threading.Event(), threading.Event()

    def then() -> float:
        seen.append(len(done))
        if len(done) == 100:
            caught_up.set()
        return 3600.0

    aside = Aside("test", lasting_page, then, fatal=False)
    aside.post((hold.wait, ()))
    for k in range(100):
        aside.post((done.append, (k,)))
    hold.set()
    until(caught_up)
    assert done == list(range(100))
    assert set(seen) <= {0, 100}  # once before anything was posted, once after all of it


def test_then_comes_back_when_it_said(lasting_page: Page) -> None:
    thrice = threading.Event()
    times: list[float] = []

    def then() -> float:
        times.append(time.monotonic())
        if len(times) == 3:
            thrice.set()
        return 0.01 if len(times) < 3 else 3600.0

    Aside("test", lasting_page, then, fatal=False)
    until(thrice)
    assert times[2] - times[0] >= 0.02


def test_a_bell_is_answered(lasting_page: Page) -> None:
    calls = threading.Semaphore(0)

    def then() -> float:
        calls.release()
        return 3600.0

    Aside("test", lasting_page, then, fatal=False).watch("gate")
    for _ in range(2):
        assert calls.acquire(timeout=20.0)  # once at start, once for the first look at the bell
    lasting_page.ring("gate")
    assert calls.acquire(timeout=20.0)


def test_the_guard_lets_one_thread_in_at_a_time() -> None:
    guard, inside, clashes = Guard(), [0], []
    stop = threading.Event()

    def touch() -> None:
        inside[0] += 1
        if inside[0] != 1:
            clashes.append(inside[0])
        for _ in range(50):
            pass
        inside[0] -= 1

    others = 0

    def other() -> None:
        nonlocal others
        while not stop.is_set():
            with guard:
                touch()
            others += 1

    threads = [threading.Thread(target=other) for _ in range(2)]
    for thread in threads:
        thread.start()
    mine = 0
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        guard.enter()
        guard.enter()  # vLLM's hooks call each other
        touch()
        guard.leave()
        guard.leave()
        mine += 1
    stop.set()
    for thread in threads:
        thread.join(20.0)
    assert not clashes
    assert mine > 100
    assert others > 10
