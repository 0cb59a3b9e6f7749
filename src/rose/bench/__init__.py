"""Load generators, traces and the statistics of what they measure."""
