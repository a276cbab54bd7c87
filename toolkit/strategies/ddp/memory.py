"""What DistributedDataParallel allocates: buckets that mirror every gradient.

torch/nn/parallel/distributed.py: `gradient_as_bucket_view=False` (the default, in Accelerate too) keeps gradients and
their copies in the reducer's buckets; with True the gradients are views of the buckets.
"""

from __future__ import annotations

from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies.lowering import Engine
from toolkit.timeline.tape import Tape
from toolkit.timeline.trace import Mark, ModelTrace


class DdpEngine(Engine):
    """A replica per rank, gradients averaged in buckets."""

    def __init__(self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster) -> None:
        super().__init__(trace, workload, plan, cluster)
        self.views = bool(plan.ddp.gradient_as_bucket_view)

    def setup(self, tape: Tape) -> None:
        super().setup(tape)
        size = sum(p.nbytes for p in self.trace.trainable)
        tape.alloc("buckets", size, "communication", "gradient buckets")

    def gradient(self, tape: Tape, mark: Mark) -> None:
        if not self.views or not self.last:
            super().gradient(tape, mark)  # without synchronisation (no_sync) they are gradients of their own, views or not
            return
        # the gradient is written into its bucket and dies; the bucket is the gradient from then on
        tape.release(mark.nbytes, "gradients", mark.name, mark.key)
        if mark.name in self.gradients:
            self.drop_gradient(tape, mark.name)
