"""Pinning stops at the system's limit, and says so."""

import warnings

import pytest

from tandem.offload.emulated import EmulatedDevice
from tandem.offload.expert_kernels import ExpertKernels
from tandem.offload.pinning import pin_store
from tests.offload.machines import make_store


def test_all_is_pinned_without_a_limit() -> None:
    store = make_store()
    device = EmulatedDevice(1 << 20, ExpertKernels(num_threads=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pin_store(store, device.pin) == (store.num_bytes, store.num_bytes)


def test_a_limit_is_respected_and_told() -> None:
    store = make_store()
    limit = store[0].num_bytes + 10
    device = EmulatedDevice(1 << 20, ExpertKernels(num_threads=1), pin_limit_bytes=limit)
    with pytest.warns(UserWarning, match=r"only .* of .* of experts could be pinned"):
        pinned = pin_store(store, device.pin)
    assert pinned == (store[0].num_bytes, store.num_bytes)
