"""Can the promise to serving be trusted? A device is simulated under every fault, and real engines
are drilled. The simulation runs what runs on a device: the node, the page, the gate, the memory
policy, the lease. Only time, processes, the disk and vLLM itself are made up.
"""
