"""Who computes each active expert of a layer: one protocol, one file per policy, names in order."""

from tandem.core.registry import Registry
from tandem.policy.assignment.balanced import Balanced
from tandem.policy.assignment.cpu_only import CpuOnly
from tandem.policy.assignment.dali import Dali
from tandem.policy.assignment.fiddler import Fiddler
from tandem.policy.assignment.gpu_only import GpuOnly
from tandem.policy.assignment.hits_on_gpu import HitsOnGpu
from tandem.policy.assignment.hybrimoe import HybriMoe
from tandem.policy.assignment.layer_static import LayerStatic
from tandem.policy.assignment.problem import Assignment, LayerProblem, Split
from tandem.policy.assignment.ratio_split import RatioSplit
from tandem.policy.assignment.ready_on_gpu import ReadyOnGpu

__all__ = ["ASSIGNMENTS", "Assignment", "LayerProblem", "Split"]

ASSIGNMENTS: Registry[Assignment] = Registry("assignment")
ASSIGNMENTS.register("balanced")(Balanced)
ASSIGNMENTS.register("dali")(Dali)
ASSIGNMENTS.register("ratio-split")(RatioSplit)
ASSIGNMENTS.register("hybrimoe")(HybriMoe)
ASSIGNMENTS.register("fiddler")(Fiddler)
ASSIGNMENTS.register("layer-static")(LayerStatic)
ASSIGNMENTS.register("hits-on-gpu")(HitsOnGpu)
ASSIGNMENTS.register("ready-on-gpu")(ReadyOnGpu)
ASSIGNMENTS.register("cpu-only")(CpuOnly)
ASSIGNMENTS.register("gpu-only")(GpuOnly)
