"""Which architectures have sequence slots on a GPU; docs/models.md says it too."""

from typing import Any

import pytest

from tandem.decode.cuda.slots import why_no_cuda_slots
from tests.architectures import architectures, build_tiny_model
from tests.decode.test_indexed import NAMES as WITH_INDEXERS
from tests.generate.test_architectures import (
    NOT_GENERATING_UPSTREAM,
    NOT_TOKEN_BY_TOKEN,
    WHY_PADDED,
)

pytestmark = pytest.mark.seam


def steps_on_gpu(name: str) -> str:
    """Say how an architecture's decode steps run on a GPU, for docs/models.md."""
    if name in NOT_TOKEN_BY_TOKEN:
        return "none"
    if name in WHY_PADDED:
        return "padded"
    return "captured, in slots" + (", torch attends" if name in WITH_INDEXERS else "")


@pytest.mark.parametrize(
    "name", sorted(set(architectures()) - NOT_TOKEN_BY_TOKEN - NOT_GENERATING_UPSTREAM)
)
def test_slots_serve_all_but_a_few(name: str) -> None:
    model: Any = build_tiny_model(name)
    assert (why_no_cuda_slots(model) is not None) == (name in WHY_PADDED)
