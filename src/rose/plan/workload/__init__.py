"""What a simulated cluster is asked to do: serving traffic, rollouts, and their swings."""
