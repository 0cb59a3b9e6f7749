"""Answers of engines of different releases become one."""

import msgspec
import pytest

from rose.scheduler.engine_client import Broken, _chunk


def event(entry: object) -> bytes:
    choice = {"token_ids": [7], "logprobs": {"content": [entry]}}
    return b"data: " + msgspec.json.encode({"choices": [choice]})


@pytest.mark.parametrize("name", [{"token_id": 7}, {"token": "token_id:7"}])
def test_tokens_of_log_probs_are_named_in_both_ways(name: dict[str, object]) -> None:
    told = name | {"logprob": -1.5, "top_logprobs": [name | {"logprob": -1.5}]}
    chunk = _chunk(event(told))
    assert chunk is not None and chunk.logprobs is not None
    both = {"token_id": 7, "token": "token_id:7", "logprob": -1.5}
    assert chunk.logprobs == [both | {"top_logprobs": [both]}]


def test_what_is_no_event_is_the_engines_failure() -> None:
    with pytest.raises(Broken, match="not an event"):
        _chunk(b"data: {")
