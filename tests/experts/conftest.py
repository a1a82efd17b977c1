"""What the tests of experts share."""

import pytest

from tandem.experts.store.host_store import HostStore
from tests.experts.machines import make_store


@pytest.fixture(scope="module")
def store() -> HostStore:
    """Experts in int8; no test writes into them."""
    return make_store()
