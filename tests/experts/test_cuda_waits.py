"""A kernel waits for a second where the driver ends long ones, and longer elsewhere."""

import ctypes
from typing import Any

import pytest

from tandem.devices.cuda.driver import Driver
from tandem.devices.cuda.waits import LONGEST_SECONDS, WATCHED_SECONDS, longest_wait
from tandem.experts.execution.captured_steps import PATIENCE_SECONDS
from tests.experts.fake_driver import FakeDriver

_INT_POINTER = ctypes.POINTER(ctypes.c_int)
_TIMEOUT = 17
_HANDLE = 40  # of a device: no index


class AskedDriver(FakeDriver):
    """Says of its second device that kernels on it have a limit."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        kind = ctypes.CFUNCTYPE(ctypes.c_int, _INT_POINTER, ctypes.c_int)
        asked = ctypes.CFUNCTYPE(ctypes.c_int, _INT_POINTER, ctypes.c_int, ctypes.c_int)
        functions = {
            "cuDeviceGet": kind(self._get),
            "cuDeviceGetAttribute": asked(self._ask),
        }
        self.functions = {(name, 2000): functions[name] for name in names}

    def _get(self, found: Any, index: int) -> int:
        found[0] = _HANDLE + index
        return 0

    def _ask(self, found: Any, attribute: int, device: int) -> int:
        assert attribute == _TIMEOUT
        found[0] = device == _HANDLE + 1
        return 0


ALL = ("cuDeviceGet", "cuDeviceGetAttribute")


@pytest.mark.parametrize(
    ("index", "names", "seconds"),
    [
        (0, ALL, LONGEST_SECONDS),
        (1, ALL, WATCHED_SECONDS),
        (0, ("cuDeviceGet",), WATCHED_SECONDS),  # a driver that does not say
        (0, (), WATCHED_SECONDS),
    ],
)
def test_a_wait_is_as_long_as_the_driver_lets_it(
    index: int, names: tuple[str, ...], seconds: float
) -> None:
    assert longest_wait(index, Driver(AskedDriver(names))) == seconds
    assert seconds < PATIENCE_SECONDS
