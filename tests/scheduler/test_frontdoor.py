"""The front door over real HTTP: cuts, kills, retries, bad input; engines are emulated."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.scheduler.conftest import Cluster, call, until

from rose.bench.emulated import CONTEXT, VOCABULARY, answer_to
from rose.net import free_ports

PROMPT = [11, 12, 13, 14]


def expected(prompt: list[int], most: int) -> list[int]:
    return answer_to(prompt, most, ignore_eos=True)[0]


def in_background(act: Callable[[], Any]) -> Any:
    return ThreadPoolExecutor(1).submit(act)


def test_tokens_log_probs_and_versions(cluster: Cluster) -> None:
    status, answer = cluster.generate(PROMPT, 20, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (status, choice["token_ids"]) == (200, expected(PROMPT, 20))
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 20}]
    assert (choice["finish_reason"], answer["prompt_token_ids"]) == ("length", PROMPT)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}


def test_a_batch_is_split_and_put_together_in_order(cluster: Cluster) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    body = {"prompt": prompts, "n": 4, "max_tokens": 6, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True, "model": "emulated"}  # fmt: skip
    status, answer = call(f"{cluster.url}/v1/completions", body)
    assert status == 200
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(12))
    assert [c["prompt_token_ids"] for c in choices] == [p for p in prompts for _ in range(4)]
    assert [c["token_ids"] for c in choices] == [expected(p, 6) for p in prompts for _ in range(4)]
    assert all(choice["weight_versions"] for choice in choices)
    served = [cluster.emulate(number)["served"] for number in range(2)]
    assert sum(served) == 12


@pytest.mark.parametrize("route", ["/inference/v1/generate", "/v1/completions"])
def test_streams_carry_every_token_once(cluster: Cluster, route: str) -> None:
    sampling = {"max_tokens": 15, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling} | {"stream": True}
    if route == "/v1/completions":
        body = {"prompt": PROMPT, "stream": True, "return_token_ids": True} | sampling
    events = stream(cluster.url + route, body)
    assert events[-1] == "[DONE]"
    parts = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [t for part in parts for t in part["token_ids"]] == expected(PROMPT, 15)
    assert parts[-1]["finish_reason"] == "length"
    assert len(parts) > 3


def stream(url: str, body: Any) -> list[str]:
    asked = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        lines = [line.decode().strip() for line in answer]
    return [line.removeprefix("data: ") for line in lines if line]


def busy(cluster: Cluster) -> int:
    """The engine that works."""
    until(cluster.running)
    return next(n for n in range(len(cluster.engines)) if cluster.emulate(n)["running"])


def test_a_turn_that_is_cut_again_and_again_is_the_uncut_one(cluster: Cluster) -> None:
    going = in_background(lambda: cluster.generate(PROMPT, 120))
    for _ in range(3):
        at = busy(cluster)
        time.sleep(0.3)
        cluster.emulate(at, revoked=True)
        until(lambda at=at: not cluster.emulate(at)["running"])
        cluster.emulate(at, revoked=False)
    status, answer = going.result()
    (choice,) = answer["choices"]
    assert (status, choice["token_ids"]) == (200, expected(PROMPT, 120))
    assert len(choice["logprobs"]["content"]) == 120
    assert sum(cluster.emulate(number)["served"] for number in range(2)) >= 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_hangs_loses_nothing(cluster: Cluster, how: int) -> None:
    going = in_background(lambda: cluster.generate(PROMPT, 150))
    at = busy(cluster)
    time.sleep(0.3)
    cluster.engines[at].signal(how)
    status, answer = going.result()
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected(PROMPT, 150))


def test_without_any_engine_turns_wait(make_cluster: Any) -> None:
    cluster = make_cluster(1)
    cluster.engines[0].end()
    going = in_background(lambda: cluster.generate(PROMPT, 5))
    time.sleep(1.0)
    assert not going.done()
    assert call(f"{cluster.url}/health")[0] == 200
    cluster.engines[0].start()
    status, answer = going.result()
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected(PROMPT, 5))


def test_a_scheduler_that_is_killed_answers_who_asks_again(cluster: Cluster) -> None:
    headers = {"X-Request-ID": "mine"}
    status, first = cluster.generate(PROMPT, 8, headers=headers)
    assert cluster.generate([1], 3, headers=headers) == (200, first | {"created": ANY})
    slow = {"X-Request-ID": "slow"}
    going = in_background(lambda: cluster.generate(PROMPT, 150, headers=slow))
    busy(cluster)
    time.sleep(1.0)
    cluster.scheduler.end()
    with pytest.raises(OSError):  # noqa: PT011 (whichever: the connection is gone)
        going.result()
    cluster.scheduler.start()
    cluster.scheduler.await_health()
    status, again = cluster.generate(PROMPT, 8, headers=headers)
    assert (status, again["choices"]) == (200, first["choices"])
    status, answer = cluster.generate(PROMPT, 150, headers=slow)
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected(PROMPT, 150))
    until(lambda: not cluster.running())


class _Any:
    def __eq__(self, other: object) -> bool:
        return True


ANY = _Any()


def leave(cluster: Cluster, most: int, headers: str = "", *, stream: bool = False) -> None:
    """Ask, and be gone as soon as an engine works on it."""
    sampling = {"max_tokens": most, "ignore_eos": True}
    asked = {"token_ids": PROMPT, "sampling_params": sampling, "stream": stream}
    body = json.dumps(asked).encode()
    with socket.create_connection(("127.0.0.1", int(cluster.url.rpartition(":")[2]))) as client:
        head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        client.sendall(f"{head}\r\n{headers}\r\n".encode() + body)
        busy(cluster)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_engine(cluster: Cluster, stream: bool) -> None:
    leave(cluster, 1000, stream=stream)
    until(lambda: not cluster.running())


def test_a_client_that_comes_back_finds_its_turn(make_cluster: Any) -> None:
    cluster = make_cluster(1, "--grace-s", 1)
    leave(cluster, 120, "X-Request-ID: mine\r\n")
    status, answer = cluster.generate(PROMPT, 120, headers={"X-Request-ID": "mine"})
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected(PROMPT, 120))
    assert cluster.emulate(0)["served"] == 1
    leave(cluster, 1000, "X-Request-ID: other\r\n")
    until(lambda: not cluster.running())


def test_a_stream_that_is_refused_says_so(shared: Cluster) -> None:
    body = {"token_ids": [VOCABULARY], "stream": True}
    *_, error, end = stream(f"{shared.url}/inference/v1/generate", body)
    assert "vocabulary" in json.loads(error)["error"]["message"]
    assert end == "[DONE]"


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("/inference/v1/generate", b"{", 400, "not JSON"),
        ("/inference/v1/generate", [], 400, "not a JSON object"),
        ("/inference/v1/generate", {}, 400, "token_ids"),
        ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids is empty"),
        ("/inference/v1/generate", {"token_ids": ["a"]}, 400, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [-1]}, 400, "token_ids[0]"),
        ("/inference/v1/generate", {"token_ids": [VOCABULARY]}, 400, "vocabulary"),
        ("/inference/v1/generate", {"token_ids": [1] * CONTEXT}, 400, "context is"),
        ("/inference/v1/generate",
         {"token_ids": [1], "sampling_params": {"n": -1}}, 400, "n is -1"),
        ("/inference/v1/generate",
         {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens is 0"),
        ("/v1/completions", {"prompt": "words"}, 400, "token ids"),
        ("/jobs/other/inference/v1/generate", {"token_ids": [1]}, 404, "no job other"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(
    shared: Cluster, route: str, body: Any, status: int, said: str
) -> None:
    found, answer = call(shared.url + route, body)
    assert (found, said in answer["error"]["message"]) == (status, True), answer
    assert shared.generate(PROMPT, 2)[0] == 200


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Cluster(tmp_path_factory.mktemp("shared"), 1)
    yield made
    made.close()


def test_a_body_that_is_too_large_is_refused(shared: Cluster) -> None:
    found, answer = call(f"{shared.url}/inference/v1/generate", b" " * (65 << 20))
    assert (found, "larger than 64 MB" in answer["error"]["message"]) == (413, True)


def test_beyond_the_queue_clients_are_asked_to_come_back(make_cluster: Any) -> None:
    cluster = make_cluster(1, "--most-waiting", 2)
    assert cluster.generate(PROMPT, 2)[0] == 200
    cluster.engines[0].signal(signal.SIGSTOP)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(cluster.generate(PROMPT, 20)[0]))
        for _ in range(300)
    ]
    for thread in threads:
        thread.start()
    until(lambda: 429 in answers)
    cluster.engines[0].signal(signal.SIGCONT)
    for thread in threads:
        thread.join()
    assert set(answers) == {200, 429}


def test_control_calls_reach_every_engine(cluster: Cluster) -> None:
    assert call(f"{cluster.url}/finish_weight_update", {"weight_version": "3"})[0] == 200
    _, info = call(f"{cluster.url}/weight_info")
    assert (info["weight_version"], len(info["engines"])) == ("3", 2)
    _, answer = cluster.generate(PROMPT, 4)
    assert answer["choices"][0]["weight_versions"] == [{"version": "3", "start": 0, "end": 4}]
    assert call(f"{cluster.url}/v1/models")[1]["data"][0]["id"] == "emulated"
    assert call(f"{cluster.url}/pause", {})[0] == 200
    assert call(f"{cluster.url}/reset_prefix_cache", {})[0] == 404


def test_two_trainers_update_engines_of_their_own(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(3, "--job", "a", "--job", "b,share=0.5")

    def update(job: str, version: int) -> set[str]:
        url = f"{cluster.url}/jobs/{job}"
        where = {"store": f"tcp://{job}:1", "job": job, "folder": "w"}
        assert call(f"{url}/init_weight_transfer_engine", {"init_info": where})[0] == 200
        assert call(f"{url}/start_weight_update", {})[0] == 200
        assert call(f"{url}/update_weights", {"update_info": {"version": version}})[0] == 200
        assert call(f"{url}/finish_weight_update", {})[0] == 200
        info = call(f"{url}/weight_info")[1]
        assert info["weight_version"] == str(version)
        return set(info["engines"])

    assert len(update("a", 7)) == 3
    assert call(f"{cluster.url}/jobs/a/pause", {})[0] == 200
    where = {"store": "tcp://b:1", "job": "b", "folder": "w"}
    refused = call(f"{cluster.url}/jobs/b/init_weight_transfer_engine", {"init_info": where})
    assert refused[0] == 503, "all engines are paused, and their trainer has to resume them"
    assert call(f"{cluster.url}/jobs/a/resume", {})[0] == 200
    of_b = update("b", 2)
    of_a = set(call(f"{cluster.url}/jobs/a/weight_info")[1]["engines"])
    assert (len(of_a), len(of_b)) == (2, 1)
    assert not of_a & of_b
    for job, version in (("a", "7"), ("b", "2")):
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
        status, answer = call(f"{cluster.url}/jobs/{job}/inference/v1/generate", body)
        assert status == 200
        assert {span["version"] for span in answer["choices"][0]["weight_versions"]} == {version}


def test_what_happens_can_be_watched(cluster: Cluster) -> None:
    going = in_background(lambda: cluster.generate(PROMPT, 60))
    cluster.emulate(busy(cluster), revoked=True)
    assert going.result()[0] == 200
    cluster.generate([-1], 2)
    _, found = call(f"{cluster.url}/rose/v1/status")
    assert (found["cuts"], found["ended"]) == ({"revoked": ANY}, {"done": 1})
    assert {engine["turns"] for engine in found["engines"]} == {0}
    shown = rose("ps", cluster.url)
    assert all(engine.url in shown for engine in cluster.engines)
    with urllib.request.urlopen(f"{cluster.url}/metrics") as answer:
        metrics = answer.read().decode()
    assert 'rose_scheduler_turns_ended_total{state="done"} 1.0' in metrics
    assert 'rose_scheduler_turns{job="default",state="queued"} 0.0' in metrics
    assert 'rose_scheduler_placements_total{reason="new"} 2.0' in metrics
    assert 'route="/inference/v1/generate",status="400"} 1.0' in metrics


def test_a_scheduler_that_is_not_there_is_named() -> None:
    (port,) = free_ports(1)
    assert f"http://127.0.0.1:{port} is no scheduler" in rose(
        "ps", f"http://127.0.0.1:{port}", code=2
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "nowhere"], "--engine nowhere is not a URL"),
        (["--engine", "http://x", "--listen", "0.0.0.0:1"], "set ROSE_SCHEDULER_SECRET"),
        (["--engine", "http://x", "--listen", "8400"], "--listen 8400 is not HOST:PORT"),
        (["--engine", "http://x", "--placement", "best"], "--placement best: choose from cost"),
        (["--engine", "http://x", "--order", "random"], "--order random: choose from"),
        (["--engine", "http://x", "--stall-s", "0"], "--stall-s 0 is not above 0"),
    ],
)
def test_bad_options_are_named(options: list[str], said: str) -> None:
    assert said in rose("scheduler", *options, code=2)


def rose(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rose.cli", *words], capture_output=True, text=True, timeout=60,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_an_engine_that_missed_an_update_is_not_taken_for_updated(cluster: Cluster) -> None:
    until(lambda: call(f"{cluster.url}/weight_info")[1]["weight_version"] == "0")
    cluster.engines[0].end()
    assert call(f"{cluster.url}/finish_weight_update", {"weight_version": "3"})[0] == 200
    _, info = call(f"{cluster.url}/weight_info")
    assert info["weight_version"] != "3"
    assert info["engines"] == {cluster.engines[0].url: "0", cluster.engines[1].url: "3"}


def test_an_aborted_turn_ends_with_its_tokens_so_far(cluster: Cluster) -> None:
    headers = {"X-Request-ID": "mine"}
    going = in_background(lambda: cluster.generate(PROMPT, 1000, headers=headers))
    busy(cluster)
    time.sleep(0.3)
    assert call(f"{cluster.url}/abort_requests", {})[0] == 400
    assert call(f"{cluster.url}/abort_requests", {"request_ids": "mine"})[0] == 400
    assert call(f"{cluster.url}/abort_requests", {"request_ids": ["other"]})[0] == 200
    assert not going.done()
    assert call(f"{cluster.url}/abort_requests", {"request_ids": ["mine"]})[0] == 200
    status, answer = going.result()
    (choice,) = answer["choices"]
    made = choice["token_ids"]
    assert (status, choice["finish_reason"]) == (200, "abort")
    assert 0 < len(made) < 1000
    assert made == expected(PROMPT, len(made))
    until(lambda: not cluster.running())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_scheduler_that_is_stopped_ends_cleanly_and_keeps_its_turns(
    cluster: Cluster, how: int
) -> None:
    headers = {"X-Request-ID": "mine"}
    going = in_background(lambda: cluster.generate(PROMPT, 150, headers=headers))
    busy(cluster)
    time.sleep(0.3)
    cluster.scheduler.signal(how)
    assert cluster.scheduler.process.wait(30) == 0
    assert "Traceback" not in cluster.scheduler.log()
    assert going.exception() is not None or going.result()[0] != 200
    until(lambda: not cluster.running())
    cluster.scheduler.start()
    cluster.scheduler.await_health()
    status, answer = cluster.generate(PROMPT, 150, headers=headers)
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected(PROMPT, 150))


def test_control_bodies_are_limited_too(shared: Cluster) -> None:
    found, answer = call(f"{shared.url}/update_weights", b" " * (65 << 20))
    assert (found, "larger than 64 MB" in answer["error"]["message"]) == (413, True)


def test_a_node_with_an_engine_that_is_no_url_is_refused(shared: Cluster) -> None:
    said = {"node": "n", "engine": "nowhere", "active": True, "offered": True, "dedicated": True}
    found, answer = call(f"{shared.url}/rose/v1/nodes", said)
    assert (found, "engine nowhere" in answer["error"]["message"]) == (400, True)
