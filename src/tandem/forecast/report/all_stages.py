"""The stages of a report, as this machine has a GPU or none."""

from tandem.core.errors import CapacityError
from tandem.devices import kind_of
from tandem.forecast.report.cpu_stages import CPU_STAGES
from tandem.forecast.report.gpu_stages import GPU_STAGES
from tandem.forecast.report.speed_stages import CPU_SPEED_STAGES, GPU_SPEED_STAGES
from tandem.forecast.report.stages import Stage


def smoke_stages() -> tuple[Stage, ...]:
    """Return what is tried first: what works at all."""
    return (*CPU_STAGES, *GPU_STAGES) if _has_gpu() else CPU_STAGES


def speed_stages() -> tuple[Stage, ...]:
    """Return the forecasts that are compared, with the GPU if there is one."""
    return GPU_SPEED_STAGES if _has_gpu() else CPU_SPEED_STAGES


def _has_gpu() -> bool:
    try:
        kind_of("cuda").require()
    except CapacityError:
        return False
    return True
