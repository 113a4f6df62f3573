"""The soak for half a minute, so that it cannot rot; see soak.py for the long one."""

import pytest
import soak


@pytest.mark.slow
def test_memory_and_descriptors_stay_flat():
    soak.run(0.5)
