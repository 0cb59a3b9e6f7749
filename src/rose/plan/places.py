"""Who may begin: places for trajectories, shared by all of them or dealt to groups.

A trajectory keeps its place from its first turn to its last, also while a tool runs. Shared places
go to whoever is next. Dealt ones are ROLL's: environments are made in groups, as many as a prompt
has samples, and each group has its own queue of prompts. A place that is free in one queue is of no
use to another; only when devices come or go, and places with them, is what waits dealt anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import groupby


class Places:
    def __init__(self, each: float, most: float, dealt: bool) -> None:
        """`each`: of a device; `most`: in all."""
        self._each, self._most, self._dealt = each, most, dealt
        self.clear(1)

    def clear(self, samples: int) -> None:
        """For trajectories of so many to a prompt, side by side."""
        self._samples = samples
        self._queues: list[deque[int]] = [deque()]
        self._taken = [0]
        """Of each queue's places."""
        self._at: dict[int, int] = {}
        """The queue of each trajectory that has begun."""

    def wait(self, trajectories: Sequence[int], *, urgent: bool = False) -> None:
        """`urgent`: before those that wait."""
        waiting = self._waiting()
        order = (trajectories, waiting) if urgent else (waiting, trajectories)
        self._deal([*order[0], *order[1]], len(self._queues))

    def leave(self, trajectory: int) -> None:
        self._taken[self._at.pop(trajectory)] -= 1

    def enter(self, devices: int) -> Iterator[int]:
        """Trajectories that begin now, with so many devices at hand."""
        whole = room = min(self._each * max(1, devices), self._most)
        if self._dealt and room < math.inf:
            count = max(1, int(room) // self._samples)
            if count != len(self._queues):
                self._deal(self._waiting(), count)
            room = self._samples
        for number, queue in enumerate(self._queues):
            while queue and self._taken[number] < room and len(self._at) < whole:
                trajectory = queue.popleft()
                self._taken[number] += 1
                self._at[trajectory] = number
                yield trajectory

    def _waiting(self) -> list[int]:
        if len(self._queues) == 1:
            return list(self._queues[0])
        return sorted(trajectory for queue in self._queues for trajectory in queue)

    def _deal(self, waiting: Sequence[int], count: int) -> None:
        """Samples of a prompt together, to the queue with fewest trajectories."""
        self._taken += [0] * (count - len(self._taken))
        self._queues = [deque() for _ in range(count)]
        loads = [(self._taken[number], number) for number in range(count)]
        heapify(loads)
        for _, group in groupby(waiting, lambda trajectory: trajectory // self._samples):
            load, number = loads[0]
            self._queues[number].extend(group)
            heapreplace(loads, (load + self._samples, number))
