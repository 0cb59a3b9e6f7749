"""What must be true of a device at every moment, whatever has broken. Judged by the truth: what
processes are there and what they do, not what the page says of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rose.executor.facts import FACTS_S

if TYPE_CHECKING:
    from rose.bench.trust.device import Device
    from rose.bench.trust.engines import SimRollout, SimServing

BACK_S = 3.0
"""Memory that serving wants, or that is held beside a serving engine unseen, is back after this."""
REVOKE_S = 5.0
"""A revocation never takes longer."""
ABANDONED_S = 5.0
"""A device without a node is free after this: nobody else could take it back."""
CALM_S = 12.0
"""When nothing breaks any more, everybody has what is theirs after this."""


@dataclass
class Promises:
    """Finds broken ones; says each kind once."""

    device: Device
    broken: dict[str, str] = field(default_factory=dict)
    unseen_launches: int = 0
    revoke_s_worst: float = 0.0
    memory_back_s_worst: float = 0.0
    _since: dict[str, float] = field(default_factory=dict)

    def break_(self, promise: str, what: str) -> None:
        at = self.device.clock() - self.device.began
        self.broken.setdefault(promise, f"at {at:.3f} s: {what}")

    # ---- when something happens

    def launched(self, rollout: SimRollout) -> None:
        """A rollout step begins."""
        device, now = self.device, self.device.clock()
        if device.taken_back:
            self.break_("nothing runs after a revocation", "a rollout step begins")
        if not rollout.borrower.may_run:
            self.break_("only an active engine runs", f"it is {rollout.borrower.state.name}")
        for serving in device.servings:
            if now - serving.seen_at > FACTS_S + 1e-6:
                self.unseen_launches += 1
                self.break_("nothing is granted beside a serving engine unseen", serving.kind)
            elif serving.told and serving.taken != rollout.known_arrivals:
                self.break_("nothing is granted past a request that came", "a step begins")
        if now - device.facts_at > FACTS_S + 1e-6:
            self.unseen_launches += 1
            self.break_("nothing is granted on old facts", f"{now - device.facts_at:.2f} s old")

    def moved(self) -> None:
        """Somebody has more or less memory."""
        rollout = self.device.rollout
        held = rollout.parking.usable if rollout is not None else 0
        for serving in self.device.servings:
            quota = serving.parking.usable if serving.parking is not None else 0
            if held + quota > serving.total_blocks:
                self.break_("memory is never held twice", f"{held} and {quota} blocks")

    def revoked(self, took: float) -> None:
        """The owner has been told that the device is theirs."""
        self.revoke_s_worst = max(self.revoke_s_worst, took)
        if took > REVOKE_S:
            self.break_("a revocation takes seconds", f"{took:.1f} s")
        promise = "a revocation is true when it is answered"
        self._is_free(promise)
        for serving in self.device.servings:
            if serving.told and serving.parking and serving.parking.usable < serving.total_blocks:
                self.break_(promise, f"serving has {serving.parking.usable} blocks")

    def _is_free(self, promise: str) -> None:
        rollout = self.device.rollout
        if rollout is None:
            return
        if rollout.parking.usable or rollout.border.claim:
            self.break_(promise, f"{rollout.parking.usable} blocks, claim {rollout.border.claim}")
        if rollout.stepping:
            self.break_(promise, "a rollout step runs")

    # ---- as time passes

    def look(self) -> None:
        device, now = self.device, self.device.clock()
        rollout = device.rollout
        if device.taken_back:
            self._is_free("nothing is held after a revocation")
            orders = device.orders()
            if orders is not None and orders.state and orders.offered:
                self.break_("what is taken back stays so", f"state {orders.state} is ordered")
        held = rollout is not None and rollout.parking.usable > 0 and not rollout.process.held
        rescuer = device.node_lives or any(serving.told for serving in device.servings)
        works = rollout is not None and not rollout.process.stopped
        unseen = any(now - serving.seen_at > FACTS_S for serving in device.servings)
        self._lasts("unseen", held and unseen and (works or rescuer), BACK_S)
        self._lasts("wanted", held and any(map(self._wants, device.servings)), BACK_S)
        self._lasts("abandoned", held and not device.node_lives and works, ABANDONED_S)

    def _wants(self, serving: SimServing) -> bool:
        """It has requests that wait for memory which the rollout engine holds."""
        return serving.told and serving.lacks > 0

    def _lasts(self, what: str, wrong: bool, most_s: float) -> None:
        now = self.device.clock()
        if not wrong:
            self._since.pop(what, None)
            return
        lasted = now - self._since.setdefault(what, now)
        if what != "abandoned":
            self.memory_back_s_worst = max(self.memory_back_s_worst, lasted)
        if lasted > most_s:
            self.break_(f"memory is back in time ({what})", f"not after {lasted:.1f} s")
