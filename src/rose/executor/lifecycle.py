"""The life of a rollout engine on a borrowed device, as a pure state machine.

    dormant --activate--> activating --memory--> active --drain--> draining --empty--> dormant
       ^                      |                    |                 |
       +------- revoke -------+------ revoke ------+---- revoke -----+

Dormant: process and weights stay, no KV memory, no CPU, new turns are ended at once with the reason
`rose:dormant`. A revocation ends what runs within one step with the reason `rose:revoked`; tokens
so far have been delivered, so a scheduler can go on elsewhere.
"""

from __future__ import annotations

from rose.executor.facts import LeaseState


def follow(state: LeaseState, ordered: LeaseState, *, has_memory: bool, empty: bool) -> LeaseState:
    """The next state, given the node's order and the engine's condition."""
    if ordered == LeaseState.DORMANT:
        return LeaseState.DORMANT
    if ordered == LeaseState.DRAINING:
        return LeaseState.DORMANT if empty or state == LeaseState.DORMANT else LeaseState.DRAINING
    if state in (LeaseState.DORMANT, LeaseState.ACTIVATING):
        return LeaseState.ACTIVE if has_memory else LeaseState.ACTIVATING
    return LeaseState.ACTIVE


def holds_memory(state: LeaseState) -> bool:
    return state != LeaseState.DORMANT


def takes_turns(state: LeaseState) -> bool:
    """Whether new turns are accepted (they may have to wait for memory while activating)."""
    return state in (LeaseState.ACTIVATING, LeaseState.ACTIVE)
