from pathlib import Path

import pytest

TRACES = Path(__file__).parents[4] / "shared" / "traces"


@pytest.fixture(scope="session")
def traces() -> Path:
    if not TRACES.is_dir():
        pytest.skip("no folder shared/traces beside the project: nothing to hold the fit against")
    return TRACES
