"""Weights from a trainer to engines elsewhere: only what changed, bit for bit."""

from rose.transfer.publisher import Publisher
from rose.transfer.subscriber import Subscriber

__all__ = ["Publisher", "Subscriber"]
