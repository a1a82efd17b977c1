"""Which architectures have sequence slots on a GPU; docs/models.md says it too."""

from typing import Any

import pytest

from tandem.decode.cuda.slots import why_no_cuda_slots
from tests.architectures import architectures, build_tiny_model
from tests.generate.test_architectures import (
    NOT_GENERATING_UPSTREAM,
    NOT_TOKEN_BY_TOKEN,
    WHY_PADDED,
)

pytestmark = pytest.mark.seam

# They select positions by keys of their own, which slots keep on the CPU alone.
WITH_INDEXERS = {
    "axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4", "mistral_large4",
    "qwen4_exp",
}  # fmt: skip


def steps_on_gpu(name: str) -> str:
    """Say how an architecture's decode steps run on a GPU, for docs/models.md."""
    if name in NOT_TOKEN_BY_TOKEN:
        return "none"
    if name in WITH_INDEXERS:
        return "padded: an indexer"
    return "padded" if name in WHY_PADDED else "captured, in slots"


@pytest.mark.parametrize(
    "name", sorted(set(architectures()) - NOT_TOKEN_BY_TOKEN - NOT_GENERATING_UPSTREAM)
)
def test_slots_serve_all_but_a_few(name: str) -> None:
    model: Any = build_tiny_model(name)
    is_padded = name in WHY_PADDED or name in WITH_INDEXERS
    assert (why_no_cuda_slots(model) is not None) == is_padded
