"""How many groups a step samples, by what was seen: the trainer's rule and the planner's."""


def to_begin(wanted: int, useless: int, begun: int, most: int) -> int:
    """Groups to begin now: one for each that is wanted and one more for each that turned out to
    be of no use, `most` in all.

    A group is replaced as soon as it is known to be useless, so that nobody waits for a round to
    end; and how many are begun follows from the groups alone, not from which of them ends first.
    """
    return min(wanted + useless, most) - begun
