"""TRL on borrowed engines, with TRL's files as they are.

`publish_weights` before a `GRPOTrainer` is made · `rollout_func` and `environment_reward` for
episodes of several turns · `WeightTransfer` for an `AsyncGRPOTrainer`. How to use them is in
`docs/trainer.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rose.net import bearer
from rose.rl.types import Trajectory
from rose.rl.weight_sync import WeightSync

if TYPE_CHECKING:
    import torch

    from rose.transfer.publisher import Report

Play = Callable[[list[Any], Any], list[Trajectory]]
"""Prompts (each as often as there are samples of it) and the trainer; an episode for each prompt,
in that order."""
RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]


class Publishing:
    """From `publish_weights` until `close`, after which TRL has its own client again."""

    def __init__(self, sync: WeightSync, generation: Any, secret: str) -> None:
        self.sync = sync
        self._generation, self._own = generation, generation.VLLMClient
        generation.VLLMClient = _client(self._own, sync, secret)

    @property
    def last(self) -> Report | None:
        """Of the last sync: `stored` bytes, `changed` of `elements`."""
        return self.sync.last

    def close(self) -> None:
        self._generation.VLLMClient = self._own
        self.sync.close()

    def __enter__(self) -> Publishing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def publish_weights(
    store: str,
    job: str = "default",
    *,
    folder: str | None = None,
    engines_from: str | None = None,
    wire: str = "bfloat16",
    patience_s: float = 300.0,
    secret: str = "",
) -> Publishing:
    """Have TRL's weight sync go through `rose.transfer` instead of NCCL, on CPUs as on GPUs.

    Call it before you make `GRPOTrainer(use_vllm=True, vllm_mode="server",
    vllm_server_base_url=DOOR)`, in every process of the trainer.

    `store` (`file://` or `tcp://`) is what the trainer writes to, `job` its name there; version
    numbers go on from what the store has. `engines_from` is where engines fetch: a store's server
    or a relay, the store itself if not said. `folder` is for the copy that engines' hosts keep.
    `wire`: engines that compute in float32, as CPU engines do, hold exactly the trainer's weights
    only with `float32`; the default rounds to bfloat16, which is what bfloat16 engines do anyway.
    `patience_s` is for engines that are not there, or do not get a version; then the sync raises
    with what the door said. `secret` is the door's, if it has one.
    """
    try:
        generation = import_module("trl.generation.vllm_generation")
    except ImportError as error:
        raise ImportError(f"TRL is not installed: pip install 'rose-rl[trl]' ({error})") from error
    sync = WeightSync(
        store,
        job,
        folder=folder,
        engines_from=engines_from,
        wire=wire,
        patience_s=patience_s,
        secret=secret,
    )
    return Publishing(sync, generation, secret)


def _client(own: Any, sync: WeightSync, secret: str) -> Any:
    class Client(own):
        """TRL's client but for how weights get to the engines."""

        def check_server(self, *args: Any, **words: Any) -> None:
            """The first that TRL asks, before it asks for anything else."""
            self.session.headers.update(bearer(secret))
            super().check_server(*args, **words)

        def init_communicator(self, device: Any = 0) -> None:
            """There is no group to join, so the trainer may be on any device."""
            sync.open(self.base_url)

        def update_named_params(
            self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            sync.send(named_params)

        def update_named_param(self, name: str, weights: torch.Tensor) -> None:
            raise NotImplementedError(f"{name}: versions are whole, use update_model_params")

        def reset_prefix_cache(self) -> None:
            """There is nothing to flush: the scheduler salts prefixes with the version, so turns of
            new weights never find what old ones computed."""

        def close_communicator(self) -> None:
            sync.close()

    return Client


class WeightTransfer:
    """`AsyncGRPOTrainer(weight_transfer=WeightTransfer(DOOR, STORE, ...))`; words as of
    `publish_weights`.

    TRL pauses generation, sends weights, resumes. Publishing needs no pause and takes most of the
    time, so `pause` and `resume` do nothing: engines go on with the turns in flight until they
    commit, between two of their steps, and that moment is all the pause there is. Turns keep their
    tokens and their KV; TRL has the log-prob of each token as it was sampled.
    """

    def __init__(
        self,
        door: str,
        store: str,
        job: str = "default",
        *,
        folder: str | None = None,
        engines_from: str | None = None,
        wire: str = "bfloat16",
        patience_s: float = 300.0,
        secret: str = "",
    ) -> None:
        self._door = door
        self.sync = WeightSync(
            store,
            job,
            folder=folder,
            engines_from=engines_from,
            wire=wire,
            patience_s=patience_s,
            secret=secret,
        )

    @property
    def last(self) -> Report | None:
        return self.sync.last

    def init_weight_transfer(self) -> None:
        self.sync.open(self._door)

    def pause(self) -> None:
        """See above."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.sync.send(iterator)

    def resume(self) -> None:
        """See above."""

    def destroy(self) -> None:
        self.sync.close()


def rollout_func(play: Play) -> RolloutFunc:
    """`GRPOTrainer(rollout_func=rollout_func(play), reward_funcs=environment_reward)`, with
    `use_vllm=True`: TRL corrects for how engines differ from the trainer only then."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        played = play(prompts, trainer)
        if len(played) != len(prompts):
            raise ValueError(f"{len(played)} episodes were played for {len(prompts)} prompts")
        return _columns(played)

    return rollout


def _columns(played: list[Trajectory]) -> dict[str, list[Any]]:
    """Log-probs of what the model did not make stay 0.0, as in TRL's own tool loop: `env_mask`
    takes them out of ratios, loss and the reported difference."""
    # TRL looks at the last token of each completion. Of one that says nothing it is the prompt's.
    begins = [min(one.prompt, len(one.tokens) - 1) for one in played]
    both = list(zip(played, begins, strict=True))
    return {
        "prompt_ids": [one.tokens[:begin] for one, begin in both],
        "completion_ids": [one.tokens[begin:] for one, begin in both],
        "logprobs": [one.logprobs[begin:] for one, begin in both],
        "env_mask": [one.mask[begin:] for one, begin in both],
        "reward": [one.reward for one in played],
    }


def environment_reward(completions: list[Any], *, reward: list[float], **_: Any) -> list[float]:
    """What the environments of `rollout_func` gave."""
    return reward
