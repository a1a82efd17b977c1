"""How long a kernel may wait for the host: some drivers end a program whose kernel runs on."""

import ctypes

from tandem.devices.cuda.driver import Driver, DriverError, open_driver

# Below the host's own patience, which would else end a step that the GPU is still in.
LONGEST_SECONDS = 9.0
# The usual limits are 2 seconds (Windows, WSL2) and 5 (a display on Linux).
WATCHED_SECONDS = 1.0
# Of the tries at load, which nothing but a broken way of signalling lets come to it.
TRIAL_SECONDS = 0.2

_HAS_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT
_VERSION = 12000


def longest_wait(index: int, driver: Driver | None = None) -> float:
    """Return for how many seconds kernels on a GPU may wait; short where nobody says."""
    driver = driver or open_driver()
    return WATCHED_SECONDS if driver is None or has_timeout(driver, index) else LONGEST_SECONDS


def has_timeout(driver: Driver, index: int) -> bool:
    """Whether the driver ends kernels that run for long on a GPU; True where it does not say."""
    device, found = ctypes.c_int(), ctypes.c_int()
    number = ctypes.POINTER(ctypes.c_int)
    try:
        get = driver.require("cuDeviceGet", _VERSION, number, ctypes.c_int)
        ask = driver.require("cuDeviceGetAttribute", _VERSION, number, ctypes.c_int, ctypes.c_int)
        get(ctypes.byref(device), index)
        ask(ctypes.byref(found), _HAS_TIMEOUT, device)
    except DriverError:
        return True
    return found.value != 0
