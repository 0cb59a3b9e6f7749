"""SLO-safe co-serving: two vLLM engines share one device's compute and KV memory.

Pure policies (no I/O, no clock of their own): `slo`, `admission`, `memory`, `latency`, `lifecycle`.
Edges: `page` (shared memory), `priority` (the kernel's scheduler), `vllm/` (the plugin classes).
"""
