"""Whose the device is: what its owner said, what was ordered, and what follows. Pure.

Three parties want something of a device. Its owner (an SRE) takes it back and lends it again; that
counts most and for longest. A scheduler borrows it while it is offered, for a term that ends when
it is not heard of any more. The node itself wakes a fresh rollout engine for its first steps, but
only on a device that is offered.

An order is written on the page before anything else is done about it: the page needs no disk and no
network, and an order on it is carried out even if the node dies in the next moment. What is
remembered elsewhere, for a page that is gone, comes after.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.executor.facts import LeaseState, NodeOrders, RolloutFacts, ServingFacts


@dataclass(frozen=True)
class Sharing:
    """How the device is shared while it is lent: the part of the orders that is no order."""

    rule: int = 0
    preempt_us: int = 0
    memory_policy: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    error_budget: float = 0.0


class TakenBack(Exception):
    """The device cannot be lent: its owner has taken it back."""


class Overtaken(Exception):
    """An order was not waited for: another one came after it."""


class Custody:
    def __init__(self) -> None:
        self.offered = True
        """A scheduler may borrow the device: not after it was taken back, until lent again."""
        self.state = LeaseState.DORMANT
        """As ordered."""
        self.epoch = 0
        self.cold = True
        """The rollout engine has not made its first steps."""

    def recall(
        self,
        left: NodeOrders | None,
        *,
        taken_back: bool,
        held: RolloutFacts | None,
    ) -> None:
        """Go on where an earlier node ended. `left` are its orders, if the page has them;
        `taken_back`: its records say so; `held`: of a rollout engine that it left running.

        The page is written first, so it counts where it is left. A lease that the engine still
        holds is kept, unless the device was taken back.
        """
        self.epoch = 1 + max(said.epoch if said is not None else 0 for said in (left, held))
        self.offered = bool(left.offered) if left is not None else not taken_back
        self.cold = held is None
        kept = self.offered and held is not None
        self.state = LeaseState(held.state) if kept and held is not None else LeaseState.DORMANT

    def take_back(self) -> None:
        self.offered = False
        self.order(LeaseState.DORMANT)

    def lend(self) -> None:
        self.offered = True

    def order(self, state: LeaseState) -> None:
        if state != LeaseState.DORMANT and not self.offered:
            raise TakenBack("the device was taken back; lend it again first (POST /activate)")
        self.state = state
        self.epoch += 1

    def engine_started(self) -> None:
        """A fresh rollout engine: it holds nothing, and no order to another one is meant for it."""
        self.cold = True
        self.order(LeaseState.DORMANT)

    def orders(self, sharing: Sharing, now: float) -> NodeOrders:
        """As they stand on the page."""
        return NodeOrders(
            epoch=self.epoch,
            written=now,
            offered=int(self.offered),
            state=self.state,
            rule=sharing.rule,
            preempt_us=sharing.preempt_us,
            memory_policy=sharing.memory_policy,
            ttft_ms=sharing.ttft_ms,
            tpot_ms=sharing.tpot_ms,
            error_budget=sharing.error_budget,
        )


def carried_out(state: LeaseState, epoch: int, said: RolloutFacts) -> bool:
    """Whether the rollout engine has done what was ordered. It is dormant only once its turns have
    ended and its memory is back; draining is carried out as soon as it is known."""
    if said.epoch < epoch:
        return False
    if state == LeaseState.DORMANT:
        holds = said.kv_claim or said.kv_resident or said.running or said.waiting
        return said.state == LeaseState.DORMANT and not holds
    return state == LeaseState.DRAINING or said.state == state


def has_memory_back(said: ServingFacts, kv_total: int) -> bool:
    """Whether serving may use the whole device again."""
    return said.kv_quota >= min(said.kv_max, kv_total)
