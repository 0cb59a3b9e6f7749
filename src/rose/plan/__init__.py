"""What would a fleet gain, and is its p99 safe? A simulator on the live policies, and a planner."""
