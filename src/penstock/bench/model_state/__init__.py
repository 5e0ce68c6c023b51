"""What a checkpoint holds, computed: model and parallelism in, every rank's files and bytes out.

Pure. The sum over ranks is the model's total, whatever the parallelism.
"""

from penstock.bench.model_state.layout_planner import LayoutRequest, plan_layout
from penstock.bench.model_state.state_layout import FileGroup, StateFile, StateLayout

__all__ = ["FileGroup", "LayoutRequest", "StateFile", "StateLayout", "plan_layout"]
