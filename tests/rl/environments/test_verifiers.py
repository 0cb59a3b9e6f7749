"""verifiers' own machinery, through a real front door, to an emulated engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponseError
from tests.scheduler.conftest import Cluster, Process, call, until

from rose.bench.emulated import VOCABULARY, answer_to
from rose.net import free_ports
from rose.rl.environments.verifiers import Episodes
from rose.rl.types import Ending, Trajectory

MOST = 12
KNOWN = {"Authorization": "Bearer open"}
USER, MODEL, END = 31_990, 31_991, 31_992
TEMPLATE = (
    f"{{% for m in messages %}}{{{{ '{USER} ' if m.role == 'user' else '{MODEL} ' }}}}"
    f"{{{{ m.content }}}} {END} {{% endfor %}}{{% if add_generation_prompt %}}{MODEL}{{% endif %}}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the emulated engine's vocabulary: a token in words is its number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("numbers")
    words = {str(number): number for number in range(VOCABULARY)}
    words |= {"<unknown>": VOCABULARY, "<end>": VOCABULARY + 1}
    backend = Tokenizer(WordLevel(words, unk_token="<unknown>"))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unknown>",
        eos_token="<end>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"), 1)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)


def play(
    door: Cluster | Process,
    tokenizer: str,
    seeds: list[int],
    *,
    player: Any = None,
    secret: str = "",
    **taskset: Any,
) -> list[list[Trajectory]]:
    environment = {"taskset": {"id": "numbers_game"} | taskset, "player": player or {}}

    async def go() -> list[list[Trajectory]]:
        async with Episodes(
            environment,
            door=door.url,
            model="emulated",
            tokenizer=tokenizer,
            sampling={"temperature": 1.0, "max_tokens": MOST},
            renderer={"name": "default"},
            secret=secret,
        ) as episodes:
            return await asyncio.gather(*(episodes.play(s, n) for n, s in enumerate(seeds)))

    return asyncio.run(go())


def check_tokens(one: Trajectory) -> list[list[int]]:
    """All that the model made is what the engine says there. What it made, turn by turn."""
    assert len(one.tokens) == len(one.mask) == len(one.logprobs)
    turns, at = [], 0
    while 1 in one.mask[at:]:
        begin = one.mask.index(1, at)
        made, _ = answer_to(one.tokens[:begin], MOST, ignore_eos=False)
        at = begin + len(made)
        assert one.tokens[begin:at] == made
        assert one.mask[begin : at + 1] in ([1] * len(made) + [0], [1] * len(made))
        assert one.logprobs[begin:at] == pytest.approx([-token / 1e4 for token in made])
        turns.append(made)
    assert one.prompt == one.mask.index(1)
    assert all(p == 0.0 for p, mine in zip(one.logprobs, one.mask, strict=True) if not mine)
    return turns


def test_an_episode_is_a_trajectory_with_the_engines_tokens(
    cluster: Cluster, tokenizer: str
) -> None:
    ((one,),) = play(cluster, tokenizer, [2], turns=3)
    assert len(check_tokens(one)) == one.turns == 3
    assert one.tokens[: one.prompt] == [USER, 102, 7, END, MODEL]
    assert (one.task, one.sample, one.reward, one.ending) == (2, 0, 0.75, Ending.DONE)
    assert len(one.versions) == 1
    assert 0.0 < one.tool_seconds < one.seconds


def test_episodes_go_on_side_by_side_and_a_seed_is_a_task(cluster: Cluster, tokenizer: str) -> None:
    played = play(cluster, tokenizer, [1, 1, 5, 2])
    ones = [one for (one,) in played]
    assert [one.tokens[1] for one in ones] == [101, 101, 101, 102]
    assert [(one.task, one.sample) for one in ones] == [(1, 0), (1, 1), (5, 2), (2, 3)]
    assert ones[0].tokens == ones[1].tokens
    for one in ones:
        check_tokens(one)


def test_turns_run_out(cluster: Cluster, tokenizer: str) -> None:
    ((one,),) = play(cluster, tokenizer, [0], turns=4, player={"max_turns": 2})
    assert (one.turns, one.reward, one.ending) == (2, 0.5, Ending.TURNS)
    assert len(check_tokens(one)) == 2


def test_a_rewritten_history_is_several_trajectories(cluster: Cluster, tokenizer: str) -> None:
    (several,) = play(cluster, tokenizer, [0], turns=2, forgetful=True)
    assert [one.tokens[1] for one in several] == [100, 201]
    for one in several:
        assert (one.turns, one.reward) == (1, 0.5)
        check_tokens(one)


def test_a_failed_episode_says_why(cluster: Cluster, tokenizer: str) -> None:
    with pytest.raises(RuntimeError, match=r"task 0 failed: .*max_tokens is 0"):
        play(cluster, tokenizer, [0], player={"sampling": {"max_tokens": 0}})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ModuleNotFoundError, match="pip install verifiers"):
        Episodes({}, door="http://127.0.0.1:1", model="m", tokenizer="t")


@pytest.fixture
def guarded(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Another front door to the same engine, which wants to hear the word `open`."""
    monkeypatch.setenv("ROSE_SCHEDULER_SECRET", "open")
    (port,) = free_ports(1)
    words = ["--engine", cluster.engines[0].url, "--listen", f"127.0.0.1:{port}"]
    words += ["--ledger", str(tmp_path / "ledger.sqlite")]
    door = Process(port, tmp_path / "scheduler.log", "-m", "rose.cli", "scheduler", *words)

    def up() -> bool:
        try:
            return call(f"{door.url}/health", headers=KNOWN)[0] == 200
        except OSError:
            return False

    try:
        until(up)
        yield door
    finally:
        door.end()


def test_a_secret_is_told_and_versions_are_noted(guarded: Process, tokenizer: str) -> None:
    url = f"{guarded.url}/finish_weight_update"
    assert call(url, {"weight_version": "7"}, KNOWN)[0] == 200
    ((one,),) = play(guarded, tokenizer, [0], secret="open")
    check_tokens(one)
    assert one.versions == [7]
    with pytest.raises(ClientResponseError, match="401"):
        play(guarded, tokenizer, [0])
