"""The HTTP routes: one URL that looks like one `vllm serve` with its RL routes."""
