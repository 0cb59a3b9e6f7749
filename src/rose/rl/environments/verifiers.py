"""Episodes of a verifiers environment, played through the front door.

A verifiers environment (0.4, the v1 API) leads the dialogue itself: its harness asks the model
through verifiers' own client, its task scores what came of it. So it does not become an
`Environment` that is stepped; it plays whole episodes, and trajectories come back. Its TrainClient
renders dialogues to tokens and asks the front door for the next ones, which it keeps with their
log-probs: tokens, mask and log-probs are the engine's, none of them is made of text again.

What is weaker than with `Environment`:

* Where the harness rewrites history, or the model's words become other tokens when they are
  rendered again (verifiers' renderers for known models see to it that they do not, its default
  renderer cannot), an episode falls apart into branches. Each is a trajectory with the whole
  reward; what the model said before they part counts in each.
* verifiers keeps no policy version by token. `versions` are those that the engines had when the
  episode began and when it ended.
* Harnesses are verifiers' matter. `null` and `bash` run a program that `uv` fetches the packages
  for, others need a container, and an agent's runtime is a remote sandbox unless its config says
  `runtime = {"type": "subprocess"}`. A harness that runs in process needs none of it.
* Only chat completions can be rendered, and tool calls only with a renderer that can read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any, Self

import aiohttp

from rose.net import bearer
from rose.rl.types import Ending, Trajectory

ENDLESS = 1000
"""Tasks that are used of a taskset without end."""
NO_KEY = "ROSE_NO_KEY"
"""A variable that nobody sets: verifiers would send the front door the key of another service."""
ENDINGS = {
    "max_turns": Ending.TURNS,
    "max_input_tokens": Ending.LENGTH,
    "max_output_tokens": Ending.LENGTH,
    "max_total_tokens": Ending.LENGTH,
}


class Episodes:
    """`environment` is verifiers' own `[env]` block; `async with` brings up what it needs."""

    def __init__(
        self,
        environment: Mapping[str, Any],
        *,
        door: str,
        model: str,
        tokenizer: str,
        sampling: Mapping[str, Any] | None = None,
        renderer: Mapping[str, Any] | None = None,
        secret: str = "",
    ) -> None:
        """`tokenizer`: folder or name of the model that dialogues are rendered for; `renderer`:
        how, if not as verifiers finds best for it; `secret`: the front door's, if it has one."""
        v1, loaders = _import("verifiers.v1"), _import("verifiers.v1.utils.loaders")
        self._door = door.rstrip("/")
        self._headers = bearer(secret)
        self._env = loaders.load_environment(loaders.resolve_env_config(dict(environment)))
        client = v1.TrainClientConfig(
            base_url=f"{self._door}/v1",
            api_key_var=NO_KEY,
            headers=self._headers,
            renderer_model_name=tokenizer,
            renderer=renderer,
        )
        self._context = v1.ModelContext(model, client, v1.SamplingConfig(**(sampling or {})))
        self._tasks: list[Any] = []
        self._up = AsyncExitStack()

    async def __aenter__(self) -> Self:
        taskset = self._env.taskset
        finite = taskset if taskset.bounded else taskset.take(ENDLESS)
        self._tasks = await asyncio.to_thread(list, finite)
        if not self._tasks:
            raise ValueError(f"the verifiers taskset {self._env.config.taskset.id} has no task")
        await self._up.enter_async_context(self._env.serving())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._up.aclose()

    async def play(self, seed: int, sample: int = 0) -> list[Trajectory]:
        """One episode of the task that `seed` names. Raises RuntimeError if it failed."""
        task = self._tasks[seed % len(self._tasks)]
        versions = await self._versions()
        episode = await self._env.run_episode(task, self._context)
        if not self._env.complete(episode):
            raise RuntimeError(f"verifiers' episode of task {seed} failed: {_failure(episode)}")
        versions |= await self._versions()
        return [
            _trajectory(trace, branch, seed, sample, sorted(versions))
            for trace in episode.traces
            if trace.agent.trainable
            for branch in trace.branches
            if branch.trainable and any(branch.sampled_mask)
        ]

    async def _versions(self) -> set[int]:
        url = f"{self._door}/weight_info"
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.get(url) as answer,
        ):
            answer.raise_for_status()
            engines = (await answer.json())["engines"]
        return {int(version) for version in engines.values() if version.isdigit()}


def _trajectory(trace: Any, branch: Any, seed: int, sample: int, versions: list[int]) -> Trajectory:
    mask = [int(made) for made in branch.sampled_mask]
    return Trajectory(
        task=seed,
        sample=sample,
        tokens=branch.token_ids,
        prompt=mask.index(1),
        mask=mask,
        logprobs=branch.logprobs,
        reward=trace.reward,
        turns=sum(node.sampled for node in branch.nodes),
        ending=ENDINGS.get(trace.stop_condition, Ending.DONE),
        versions=versions,
        seconds=trace.timing.agent.duration,
        tool_seconds=trace.timing.agent.harness.duration,
    )


def _failure(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "it gave no reason"


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "verifiers":
            raise
        raise ModuleNotFoundError(
            "verifiers environments need the package verifiers: pip install verifiers==0.4.0",
            name=error.name,
        ) from error
