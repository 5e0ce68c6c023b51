"""What a checkpoint holds, by arithmetic alone: model and parallelism in, every rank's files and bytes out.

Place in the flow: between a model (`workload.model`) and everybody who writes, reads, sizes or judges
checkpoints. Invariant: it is pure, and the sum over ranks is the model's total, whatever the parallelism.
"""

from penstock.bench.model_state.layout_planner import LayoutRequest, plan_layout
from penstock.bench.model_state.state_layout import FileGroup, StateFile, StateLayout

__all__ = ["FileGroup", "LayoutRequest", "StateFile", "StateLayout", "plan_layout"]
