"""Whatever happens to the rollout engine, the node or the page: serving's users do not notice.

In every test but the one about serving's own death a stream of serving requests runs until the
memory is back, and is checked token by token at its end. Tests run in this order: those that need
an engine to be started again come last, with the restart of the node among them.
"""

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rose.bench.arrivals import Fixed
from rose.executor.facts import LeaseState
from rose.executor.page import SIZE, Page

TURNS: dict[str, Any] = {"in_flight": 6, "turns": 2, "prompt_tokens": Fixed(200)}
RESTART_S = 240.0


@pytest.fixture(autouse=True)
def _leave_no_restart_unnoticed(node: Any, request: pytest.FixtureRequest) -> Any:
    """A test that does not kill an engine must not find it restarted."""
    before = node.status()["restarts"]
    yield
    if not request.node.name.startswith(("test_kill", "test_stop", "test_out_of_memory")):
        assert node.status()["restarts"] == before


def restarted(node: Any, role: str, before: int) -> None:
    """Wait until the engine is up again, in a new process."""
    node.until(
        lambda: node.status()["restarts"][role] > 0 and node.core(role) != before,
        f"the node starts {role} again",
        RESTART_S,
    )
    node.await_ready(RESTART_S)


def serving_has_all(node: Any) -> None:
    node.until(lambda: node.serving().kv_quota == node.serving().kv_max, "serving has all memory")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# ---- pages


def test_a_lying_rollout_half_cannot_take_servings_headroom(node: Any, serving_load: Any) -> None:
    liar = Page.open(node.page_path)
    floor = int(0.2 * node.page.kv_total)
    honest = node.rollout()
    everything = msgspec.structs.replace(
        honest, kv_claim=1 << 49, kv_max=1 << 49, kv_revision=honest.kv_revision + 10**6
    )
    absurd = [{"kv_claim": -1}, {"kv_claim": 1 << 62}, {"state": 77}, {"kv_used": -(1 << 40)}]
    with serving_load(node.serving_url):
        for lie in [everything, *(msgspec.structs.replace(honest, **lie) for lie in absurd)]:
            liar.publish("rollout", lie)
            liar.ring("serving")
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                assert node.serving().kv_quota >= floor - (1 << 15)  # less than one block
                time.sleep(0.01)
        serving_has_all(node)  # the next honest word counts again
    node.activate()


def test_rollout_refuses_to_work_on_a_lying_serving_half(
    active_node: Any, start_rollouts: Any, complete: Any, random_prompts: Any
) -> None:
    node = active_node
    liar = Page.open(node.page_path)
    honest = node.serving()
    lies = [{"next_step_s": float("nan")}, {"kv_used": 1 << 60}, {"ttft_s": 0.0}, {"running": -5}]
    going = start_rollouts(node.rollout_url, trajectories=6, turn_tokens=Fixed(150), **TURNS)
    node.until(lambda: going.tokens > 50, "rollouts run")
    for lie in lies:
        refused = node.rollout().refused_page

        def lied_to(lie: Any = lie, refused: int = refused) -> bool:
            """Lie again at every look: the real engine mends its half four times a second."""
            liar.publish("serving", msgspec.structs.replace(honest, **lie))
            return node.rollout().refused_page > refused

        node.until(lied_to, f"refuses {lie}")
        complete(node.serving_url, "tiny-a", random_prompts(0, 1, 20), 4)
    going.finish()


def test_a_page_truncated_while_live(
    active_node: Any, start_rollouts: Any, serving_load: Any
) -> None:
    node = active_node
    with serving_load(node.serving_url):
        going = start_rollouts(node.rollout_url, trajectories=6, turn_tokens=Fixed(80), **TURNS)
        node.until(lambda: going.tokens > 100, "rollouts run")
        for _ in range(3):
            os.truncate(node.page_path, 0)
            time.sleep(0.3)
        node.revoke()
        serving_has_all(node)
        node.activate()
        going.finish()
    node.until(lambda: node.page_path.stat().st_size >= SIZE, "the node mends the page")
    Page.open(node.page_path).close()


def test_a_page_overwritten_while_live(
    active_node: Any, start_rollouts: Any, serving_load: Any
) -> None:
    node = active_node
    garbage = random.Random(1)
    with serving_load(node.serving_url):
        going = start_rollouts(node.rollout_url, trajectories=6, turn_tokens=Fixed(80), **TURNS)
        node.until(lambda: going.tokens > 100, "rollouts run")
        for _ in range(3):
            with node.page_path.open("r+b") as file:
                file.write(garbage.randbytes(SIZE))
            time.sleep(0.3)
        node.revoke()
        serving_has_all(node)
        node.activate()
        going.finish()
    node.until(lambda: node.page_path.read_bytes()[:8] == b"ROSEPAGE", "the node mends the page")
    Page.open(node.page_path).close()


# ---- processes


def test_kill_of_the_rollout_core(active_node: Any, start_rollouts: Any, serving_load: Any) -> None:
    node = active_node
    with serving_load(node.serving_url):
        going = start_rollouts(node.rollout_url, trajectories=6, turn_tokens=Fixed(80), **TURNS)
        node.until(lambda: going.tokens > 100, "rollouts run")
        core = node.core("rollout")
        os.kill(core, signal.SIGKILL)
        serving_has_all(node)
        restarted(node, "rollout", core)
        assert node.rollout().state == LeaseState.DORMANT
        node.activate()
        assert going.finish().broken


def test_kill_of_the_rollout_api_server(active_node: Any, serving_load: Any) -> None:
    node = active_node
    with serving_load(node.serving_url):
        server, core = node.status()["rollout"]["pid"], node.core("rollout")
        os.kill(server, signal.SIGKILL)
        node.until(lambda: gone(core), "the orphaned core is ended")
        serving_has_all(node)
    restarted(node, "rollout", core)


def test_kill_of_the_node(active_node: Any, start_rollouts: Any, serving_load: Any) -> None:
    node = active_node
    before = node.status()
    cores = node.core("serving"), node.core("rollout")
    with serving_load(before["serving"]["url"]):
        going = start_rollouts(
            before["rollout"]["url"], trajectories=6, turn_tokens=Fixed(250), **TURNS
        )
        node.until(lambda: going.tokens > 100, "rollouts run")
        node.process.kill()
        node.process.wait()
        # Nobody could take the device back now, so the engine lets go by itself.
        node.until(lambda: node.rollout().state == LeaseState.DORMANT, "rollout lets go")
        node.until(lambda: node.rollout().kv_resident == 0, "memory goes back")
        serving_has_all(node)
        node.start()
        node.await_ready()
        after = node.status()
        for role in ("serving", "rollout"):
            assert after[role] == before[role]
        assert (node.core("serving"), node.core("rollout")) == cores
        node.activate()
        going.finish()


def test_stop_of_the_rollout_core(active_node: Any, start_rollouts: Any, serving_load: Any) -> None:
    node = active_node
    with serving_load(node.serving_url):
        going = start_rollouts(node.rollout_url, trajectories=6, turn_tokens=Fixed(80), **TURNS)
        node.until(lambda: going.tokens > 100, "rollouts run")
        core = node.core("rollout")
        os.kill(core, signal.SIGSTOP)
        node.until(lambda: gone(core), "the stopped core is killed")
        serving_has_all(node)
    restarted(node, "rollout", core)
    node.activate()
    going.finish()


def test_out_of_memory_of_the_rollout_engine(
    active_node: Any, start_rollouts: Any, serving_load: Any
) -> None:
    node = active_node
    core, serving_core = node.core("rollout"), node.core("serving")
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (core, serving_core)]
    assert scores[0] > scores[1], "the kernel would take the serving engine first"
    with serving_load(node.serving_url):
        now = psutil.Process(core).memory_info().vms
        resource.prlimit(core, resource.RLIMIT_AS, (now, now))
        going = start_rollouts(
            node.rollout_url,
            in_flight=16,
            trajectories=16,
            turns=1,
            prompt_tokens=Fixed(1500),
            turn_tokens=Fixed(8),
        )
        node.until(lambda: gone(core) or going.done, "it dies or does without")
        if gone(core):
            serving_has_all(node)
    if gone(core):
        restarted(node, "rollout", core)
        node.activate()
    going.finish()


def test_kill_of_the_serving_core(
    active_node: Any, start_rollouts: Any, complete: Any, random_prompts: Any, judge: Any
) -> None:
    node = active_node
    core, url = node.core("serving"), node.serving_url
    going = start_rollouts(node.rollout_url, trajectories=6, turn_tokens=Fixed(150), **TURNS)
    node.until(lambda: going.tokens > 100, "rollouts run")
    os.kill(core, signal.SIGKILL)
    (lost,) = complete(url, "tiny-a", random_prompts(0, 1, 20), 4)
    assert lost.error, "a request to a dead engine is answered with an error"
    node.until(lambda: node.rollout().kv_resident == 0, "rollout gives back what may be wanted")
    begun = node.rollout().begun

    def is_dead() -> bool:
        """Killed in the middle of a word, its section cannot be read until it is written anew."""
        reading = node.page.serving()
        return reading is None or reading.writer.pid == core

    while is_dead():
        facts = node.rollout()
        if is_dead():
            assert (facts.begun, facts.kv_claim) == (begun, 0), "nobody may say what serving needs"
        time.sleep(0.02)
    restarted(node, "serving", core)
    going.finish()
    assert node.serving_url == url
    (answer,) = complete(url, "tiny-a", random_prompts(0, 1, 20), 24)
    judge.accept("tiny-a", answer.prompt, answer.tokens)


# ---- at start


@pytest.mark.parametrize("kind", ["foreign", "layout", "folder"])
def test_serving_starts_without_lending_when_its_page_is_unusable(stock: Any, kind: str) -> None:
    found = stock.result("unusable_pages")[kind]
    assert found["tokens"] == stock.result("stock")["tiny-a"]["tokens"]
    assert not found["lends"]
    assert found["untouched"], "it deleted a file that is not its own"
