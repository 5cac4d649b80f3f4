"""How many examples Hypothesis draws, and what every test can count on: no network.

The profile is NVA_HYPOTHESIS, else `ci` where CI=true, else `quick`. Folds over random events take
their number of examples from it; a test whose example costs more sets its own, smaller one."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = (
    "1"  # read when transformers is first imported, so set before any test module is
)

N_EXAMPLES = {"quick": 50, "full": 2_000, "deep": 50_000}

for name, n_examples in N_EXAMPLES.items():
    # No deadline: the first example of a test pays for imports. No health check of speed for the
    # same reason.
    settings.register_profile(
        name, max_examples=n_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.register_profile("ci", settings.get_profile("full"), derandomize=True, print_blob=True)

is_ci = os.environ.get("CI") == "true"
settings.load_profile(os.environ.get("NVA_HYPOTHESIS") or ("ci" if is_ci else "quick"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model; a test that needs it fails without it, since a skip would hide that
    nothing ran."""
    from nva.loading.find import (
        demo_folder,  # here, so that torch is not imported for tests that don't need it
    )

    folder = demo_folder()
    assert folder.exists(), f"{folder} is missing; run `make model`"
    return folder


@pytest.fixture(scope="session")
def gemma_model(demo_model: Path) -> Path:
    """Folder of Gemma 3 270M; likewise."""
    folder = demo_model.with_name("gemma-3-270m")
    assert folder.exists(), f"{folder} is missing; run `make models`"
    return folder
