"""Agentic RL on borrowed devices: agents, environments, a small trainer, and TRL."""
