"""The devices that can compute experts, by name, with the properties that options depend on.

Loads no torch, so that `--help` is fast; each kind imports what it needs when it is used.
"""

from tandem.core.registry import Registry
from tandem.experts.cache.sizing import DeviceMemory


class DeviceKind:
    """A kind of device and its properties; an instance is made without loading device code."""

    help: str
    machine = ""
    """The module whose `device_parts` builds the device for a loaded model; empty for the CPU."""
    holds_dense_parts = False
    """Whether the device's memory also holds the model's dense parts."""
    is_in_host_memory = False
    """Whether the device's memory is host memory."""
    has_graphs = False
    """Whether a decode step may run as one graph; otherwise each of its layers is planned."""

    spinning_threads = 0
    """The threads beside those that compute experts which are busy while a step runs."""

    def require(self) -> None:
        """Raise `CapacityError` if the machine has no such device."""

    def memory(self) -> DeviceMemory:
        """Return the device's total and free memory; `CapacityError` if there is no such device."""
        from tandem.experts.store.host_memory import available_bytes

        available = available_bytes()
        return DeviceMemory(available, available)


DEVICES: Registry[DeviceKind] = Registry("device")


@DEVICES.register("cpu")
class Cpu(DeviceKind):
    """The CPU alone, without another device."""

    help = "every expert there"


@DEVICES.register("cuda")
class Cuda(DeviceKind):
    """The first NVIDIA GPU."""

    help = "a GPU"
    machine = "tandem.machines.cuda"
    holds_dense_parts = has_graphs = True
    spinning_threads = 2  # one copies experts, one launches and reports steps

    def require(self) -> None:
        """Raise `CapacityError` if Tandem cannot use the GPU, or there is no GPU or driver."""
        from tandem.devices.cuda.checks import require_cuda

        require_cuda()

    def memory(self) -> DeviceMemory:
        """Return the GPU's total and free memory; raises `CapacityError` as `require` does."""
        from tandem.devices.cuda.streams import CudaStreams

        self.require()
        return CudaStreams(0).memory()


@DEVICES.register("emulated")
class Emulated(DeviceKind):
    """A simulated GPU, which uses part of the host memory as its own."""

    help = "a simulated GPU on the CPU"
    is_in_host_memory = has_graphs = True
    machine = "tandem.machines.emulated"


def kind_of(device: str) -> DeviceKind:
    """Return the kind of device with this name; `ConfigError` with the nearest names if unknown."""
    return DEVICES.factory(device)()
