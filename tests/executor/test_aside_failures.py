"""What fails in the second thread: it is said, counted and tried again; the thread goes on."""

import logging
import os
import signal
import threading
from collections.abc import Callable

import pytest

from rose.executor.aside import Aside
from rose.executor.page import Page

ENOUGH_S = 20.0
"""For what must happen, on a machine of any speed."""
NEVER_S = 3600.0


def until(true: threading.Event) -> None:
    assert true.wait(ENOUGH_S)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.executor.aside.FAILED_S", 0.001)


def failing(times: int, over: threading.Event) -> Callable[[], float]:
    left = iter(range(times))

    def then() -> float:
        if next(left, None) is not None:
            raise ValueError("broken on purpose")
        over.set()
        return NEVER_S

    return then


def said(caplog: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.getMessage() for record in caplog.records)


def test_what_fails_is_tried_again_and_said_after_every_doubling(
    lasting_page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    aside = Aside("failing", lasting_page, failing(100, over), fatal=False)
    until(over)
    assert aside.failures == 100
    assert said(caplog, "nothing is lent any more") == 7  # failures 1, 2, 4 .. 64
    assert caplog.records[0].levelno == logging.CRITICAL
    assert "broken on purpose" in caplog.text


def test_a_job_that_fails_takes_no_other_with_it(
    lasting_page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    hold, over = threading.Event(), threading.Event()

    def job(number: int) -> None:
        if number == 1:
            raise ZeroDivisionError
        done.append(number)

    def then() -> float:
        if done == [0, 2]:
            over.set()
        return NEVER_S

    aside = Aside("test", lasting_page, then, fatal=False)
    aside.post((hold.wait, ()))
    for number in range(3):
        aside.post((job, (number,)))
    hold.set()
    until(over)
    assert aside.failures == 1
    assert said(caplog, "what an engine step means for lending was lost") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_watches_a_bell_starts_a_dead_thread_again(
    lasting_page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    lives: list[str] = []

    def then() -> float:
        lives.append(threading.current_thread().name)
        if len(lives) == 2:
            raise SystemExit  # what `except Exception` does not catch
        if len(lives) > 2:
            over.set()
        return NEVER_S

    aside = Aside("mortal", lasting_page, then, fatal=False)
    aside.watch("gate")  # looks at once, which wakes the thread to its death
    until(over)
    assert set(lives) == {"rose-mortal"}
    assert said(caplog, "thread mortal has died; starting it again") >= 1


def test_a_bell_that_cannot_be_heard_is_listened_to_again(
    lasting_page: Page, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard = threading.Event()
    deaf = [5]
    listen = lasting_page.bell

    def bell(name: str) -> int:
        if deaf[0]:
            deaf[0] -= 1
            raise OSError("no bell today")
        return listen(name)

    def then() -> float:
        if not deaf[0]:
            heard.set()
        return NEVER_S

    monkeypatch.setattr(lasting_page, "bell", bell)
    Aside("test", lasting_page, then, fatal=False).watch("gate")
    until(heard)
    assert said(caplog, "the bell gate cannot be heard") == 3  # failures 1, 2, 4


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("rose.executor.aside.os.kill", lambda *what: sent.append(what))
    return sent


@pytest.mark.parametrize("what", ["then", "job"])
def test_a_rollout_engine_ends_when_its_own_thread_fails(
    lasting_page: Page, killed: list[tuple[int, int]], what: str
) -> None:
    over = threading.Event()
    aside = Aside("failing", lasting_page, failing(what == "then", over), fatal=True)
    if what == "job":
        until(over)
        over.clear()
        aside.post((lambda: {}["broken on purpose"], ()))
    until(over)
    assert killed == [(os.getpid(), signal.SIGTERM)]


def test_a_serving_engine_never_ends_for_it(
    lasting_page: Page, killed: list[tuple[int, int]]
) -> None:
    over = threading.Event()
    Aside("failing", lasting_page, failing(3, over), fatal=False)
    until(over)
    assert not killed
