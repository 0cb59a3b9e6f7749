"""Elastic rollout scheduling: every turn finds a device, none is lost. See docs/scheduler.md."""
