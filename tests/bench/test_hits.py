from __future__ import annotations

from rose.bench.hits import PrefixHits, parse

METRICS = """# HELP vllm:prefix_cache_queries_total Prefix cache queries
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="smollm2"} 11764.0
vllm:prefix_cache_queries_created{engine="0",model_name="smollm2"} 1.79e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="smollm2"} 320.0
# TYPE vllm:external_prefix_cache_queries_total counter
vllm:external_prefix_cache_queries_total{engine="0",model_name="smollm2"} 7.0
"""


def test_only_the_engines_own_cache_is_counted() -> None:
    assert parse(METRICS) == PrefixHits(11764, 320)


def test_a_window_is_the_difference() -> None:
    window = PrefixHits(300, 120) - PrefixHits(100, 20)
    assert window.rate == 0.5
    assert (window + PrefixHits(200, 200)).rate == 0.75
    assert PrefixHits().rate is None
