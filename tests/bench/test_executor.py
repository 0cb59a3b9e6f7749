"""Which scenarios a run has, in which modes, on which engines, for how long."""

from __future__ import annotations

import os

import pytest

from rose.bench.chats import Chats
from rose.bench.colocated import Workload
from rose.bench.completions import Completions
from rose.bench.executor import MAIN_MODES, QUICK_S, SCENARIOS, Settings, node_config
from rose.bench.surges import Surges
from rose.cluster.config import ConfigError

NEW = ("shared_prefix", "long_prompts", "pressure")


def names(settings: Settings) -> list[str]:
    return [scenario.name for scenario in settings.scenarios()]


def test_quick_alone_is_one_scenario() -> None:
    settings = Settings(quick=True)
    (scenario,) = settings.scenarios()
    assert scenario.name == "bursty_60"
    assert scenario.modes == MAIN_MODES
    assert settings.window(scenario, 0.1) == QUICK_S
    assert not settings.only_orders
    assert list(settings.by_memory()) == [settings.kv_gb]


@pytest.mark.parametrize("name", [scenario.name for scenario in SCENARIOS])
def test_quick_runs_exactly_the_scenario_that_is_named(name: str) -> None:
    settings = Settings(quick=True, only=(name,))
    assert names(settings) == [name]
    assert settings.only_orders
    assert [len(group) for group in settings.by_memory().values()] == [1]
    (scenario,) = settings.scenarios()
    assert set(scenario.modes) <= set(MAIN_MODES)
    assert {"serving_alone", "rollout_alone", "rose", "rose_gate"} <= set(scenario.modes)


@pytest.mark.parametrize("name", NEW)
def test_the_new_scenarios_run_in_all_main_modes(name: str) -> None:
    for quick in (False, True):
        (scenario,) = Settings(quick=quick, only=(name,)).scenarios()
        assert scenario.modes == MAIN_MODES


@pytest.mark.parametrize("name", NEW)
def test_a_quick_window_ends_early_on_a_fast_device(name: str) -> None:
    settings = Settings(quick=True, only=(name,))
    (scenario,) = settings.scenarios()
    slow, fast = settings.window(scenario, 1.0), settings.window(scenario, 6.0)
    assert slow == settings.window(scenario)
    assert fast == 20.0 < slow
    assert settings.window_alone(slow) < slow


def test_named_modes_are_beside_those_that_all_need() -> None:
    settings = Settings(quick=True, only=("pressure",), modes=("rose",))
    assert settings.scenarios()[0].modes == (
        "serving_alone",
        "serving_again",
        "rollout_alone",
        "rose",
    )


def test_a_full_run_has_everything_once() -> None:
    settings = Settings()
    assert names(settings) == [scenario.name for scenario in SCENARIOS]
    assert set(NEW) <= set(names(settings))
    groups = settings.by_memory()
    assert next(iter(groups)) == settings.kv_gb
    assert sorted(s.name for group in groups.values() for s in group) == sorted(names(settings))


def test_memory_is_measured_on_the_engines_of_the_settings() -> None:
    groups = Settings(only=("shared_prefix",)).by_memory()
    assert [(kv_gb, len(group)) for kv_gb, group in groups.items()] == [(0.25, 0), (0.5, 1)]
    core = min(os.sched_getaffinity(0))
    assert node_config(Settings(device=f"cpu:{core}"), 0.5).kv_gb == 0.5


@pytest.mark.parametrize("quick", [False, True])
def test_unknown_scenarios_are_refused(quick: bool) -> None:
    with pytest.raises(ConfigError, match=r"--scenario nothing: choose from .*shared_prefix"):
        Settings(quick=quick, only=("nothing",)).by_memory()


def test_each_scenario_has_its_users() -> None:
    found = {scenario.name: type(scenario.users(1.0, 5000)) for scenario in SCENARIOS}
    assert found.pop("shared_prefix") is Chats
    assert found.pop("long_prompts") is Completions
    assert found.pop("pressure") is Surges
    assert set(found.values()) == {Workload}
