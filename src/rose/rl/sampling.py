"""How many groups a step samples next, by what was seen: the trainer's rule and the planner's."""

import math


def next_round(wanted: int, found: int, tried: int, most: int) -> int:
    """As many as it will likely take until `found` groups are `wanted`, `most` tried in all.

    The first round is what is wanted; after that the share of groups that were of use so far says
    how many to try for one that is missing.
    """
    missing = wanted - found
    if missing <= 0:
        return 0
    share = (found + 1) / (tried + 1) if tried else 1.0
    return min(math.ceil(missing / share), most - tried)
