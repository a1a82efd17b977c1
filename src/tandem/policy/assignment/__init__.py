"""Assigns each active expert of a layer to a processor: one protocol, and its policies by name."""

from tandem.core.registry import Registry
from tandem.policy.assignment import baselines, in_graph
from tandem.policy.assignment.balanced import Balanced
from tandem.policy.assignment.problem import Assignment, LayerProblem, Split

__all__ = ["ASSIGNMENTS", "IN_GRAPH", "NATIVE", "Assignment", "LayerProblem", "Split"]

# Rules that a decode step in one graph can follow, because hits stay on the device.
IN_GRAPH = ("ready-on-gpu", "balanced-in-graph", "dali-in-graph")
# Rules that the native decider knows, in the order of csrc/decider/assignment.hpp.
NATIVE = (*IN_GRAPH, "balanced")

ASSIGNMENTS: Registry[Assignment] = Registry("assignment")
ASSIGNMENTS.register("balanced")(Balanced)
ASSIGNMENTS.register("dali")(baselines.Dali)
ASSIGNMENTS.register("ratio-split")(baselines.RatioSplit)
ASSIGNMENTS.register("hybrimoe")(baselines.HybriMoe)
ASSIGNMENTS.register("fiddler")(baselines.Fiddler)
ASSIGNMENTS.register("layer-static")(baselines.LayerStatic)
ASSIGNMENTS.register("hits-on-gpu")(baselines.HitsOnGpu)
ASSIGNMENTS.register("ready-on-gpu")(in_graph.ReadyOnGpu)
ASSIGNMENTS.register("balanced-in-graph")(in_graph.BalancedInGraph)
ASSIGNMENTS.register("dali-in-graph")(in_graph.DaliInGraph)
ASSIGNMENTS.register("cpu-only")(baselines.CpuOnly)
ASSIGNMENTS.register("gpu-only")(baselines.GpuOnly)
