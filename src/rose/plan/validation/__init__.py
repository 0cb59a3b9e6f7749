"""Is the simulation right? What benchmarks measured on this machine, simulated and compared.

`executor` plays what `rose bench executor` measured, `e2e` what `rose bench e2e` did: the same
arrivals, the same rollouts, the same promises. Devices are simulated from latency profiles that
were measured before; what else is taken from the measurement is said in each file.
"""
