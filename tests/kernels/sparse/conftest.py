"""Two threads: what kernels give may not depend on how their work is shared."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _several_threads(several_threads: None) -> None:
    pass
