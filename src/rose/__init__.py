"""Agentic-RL rollouts on the idle part of LLM-serving devices."""

__version__ = "0.1.0"
