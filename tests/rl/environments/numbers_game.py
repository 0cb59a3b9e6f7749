"""A verifiers environment that needs no network: the user says numbers, the model says its own.

Loaded by verifiers as the taskset `numbers_game`, with its environment and its harness.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["InProcess", "NumbersEnv", "NumbersTaskset"]


class Row(vf.TaskData):
    turns: int
    forgetful: bool
    """The harness sends the last message alone."""


class NumbersTask(vf.Task[Row, vf.State, vf.TaskConfig]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return trace.num_turns / 4


class NumbersConfig(vf.TasksetConfig):
    turns: int = 1
    forgetful: bool = False


class NumbersTaskset(vf.Taskset[NumbersTask, NumbersConfig]):
    def load(self) -> Iterator[NumbersTask]:
        for first in range(4):
            row = Row(
                prompt=f"{100 + first} 7",
                turns=self.config.turns,
                forgetful=self.config.forgetful,
            )
            yield NumbersTask(row, self.config.task)


class InProcess(vf.Harness[vf.HarnessConfig]):
    """One question, one answer, without any program."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        said = (
            [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        )
        heard = said[-1:] if trace.task.data.forgetful else said
        body = {"model": ctx.model, "messages": [message_to_wire(one) for one in heard]}
        async with httpx.AsyncClient(timeout=60.0) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {secret}"},
            )
        answer.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class NumbersEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class NumbersEnv(vf.Env[NumbersEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for number in range(1, task.data.turns):
                if segment.terminated:
                    break
                segment = await interaction.turn(f"{200 + number} 7 7")
