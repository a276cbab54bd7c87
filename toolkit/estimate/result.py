"""What an estimate says: the peak of one rank's timeline with its breakdown, host memory and step time.

Every size is in bytes. `Estimate.to_json` is the contract of `toolkit estimate --json` (schema 1).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from toolkit.specs import Cluster, ModelSpec, Plan, Workload

CATEGORIES = (
    "parameters",
    "gradients",
    "master_weights",
    "optimizer_states",
    "activations",
    "logits_and_loss",
    "communication",
    "temporaries",
)


@dataclass(frozen=True, kw_only=True)
class PeakPoint:
    """Where on the timeline a peak stands."""

    phase: str
    """load, forward, loss, backward, optimizer."""
    module: str
    """Module path (`model.layers.31.mlp`), or the engine's action there (`all-gather`)."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory of one node: all ranks of the node together."""

    peak: int
    pinned: int
    capacity: int | None
    fits: bool


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of the rank that takes the most."""

    peak_allocated: int
    """Highest point of the second and later optimizer steps."""
    peak_reserved: int
    """The same through the device's allocator: with its rounding, pools and fragmentation."""
    outside_allocator: int
    """Context, communicators, libraries: a stated estimate, see `outside_interval`."""
    outside_interval: tuple[int, int]
    capacity: int
    first_step_peak: int
    resident: int
    """Held between steps."""
    at_peak: PeakPoint
    breakdown: dict[str, int]
    """Bytes by category (CATEGORIES) at the peak; sums to peak_allocated."""
    largest: tuple[tuple[str, str, int], ...] = ()
    """(category, what, bytes) of the largest groups alive at the peak, largest first."""
    by_module: tuple[tuple[str, int], ...] = ()
    """(module path, bytes) alive at the peak, largest first."""
    load_peak: int = 0
    """Device bytes while the model is loaded and the engine is set up."""
    host: HostMemory = field(default_factory=lambda: HostMemory(peak=0, pinned=0, capacity=None, fits=True))
    nvme: int = 0
    notes: tuple[str, ...] = ()
    """What the estimate assumes or leaves out, one sentence each."""

    @property
    def peak_total(self) -> int:
        return self.peak_reserved + self.outside_allocator

    @property
    def headroom(self) -> int:
        return self.capacity - self.peak_total

    @property
    def fits(self) -> bool:
        """A physical claim without a margin: the total is at most the capacity and the host holds its share."""
        return self.headroom >= 0 and self.host.fits


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """One optimizer step of the whole job."""

    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: float | None
    communication_share: float
    """Share of the step in which communication is waited for, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the trace counted in the model."""

    name: str
    kind: str
    architecture: str
    parameters: int
    trainable_parameters: int
    layers: int
    vocab_size: int
    hidden_size: int
    left_out: tuple[str, ...] = ()
    """Parts of a multimodal model that are not counted: only its text model is."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One plan's memory and time."""

    model: ModelFacts
    workload: Workload
    cluster: Cluster
    plan: Plan
    memory: MemoryEstimate
    time: TimeEstimate | None

    def to_json(self) -> dict[str, Any]:
        """The object of the contract: plain data, sizes as integers."""
        memory = dataclasses.asdict(self.memory)
        for name in ("peak_total", "headroom", "fits"):
            memory[name] = getattr(self.memory, name)
        memory["largest"] = [{"category": c, "what": w, "bytes": b} for c, w, b in self.memory.largest]
        memory["by_module"] = [{"module": m, "bytes": b} for m, b in self.memory.by_module]
        plan = dataclasses.asdict(self.plan)
        plan["label"] = self.plan.label
        cluster = dataclasses.asdict(self.cluster)
        cluster["world_size"] = self.cluster.world_size
        return {
            "schema": 1,
            "model": dataclasses.asdict(self.model),
            "workload": dataclasses.asdict(self.workload),
            "cluster": cluster,
            "plan": plan,
            "memory": memory,
            "time": None if self.time is None else dataclasses.asdict(self.time),
        }


__all__ = ["CATEGORIES", "Cluster", "Estimate", "HostMemory", "MemoryEstimate", "ModelFacts", "ModelSpec", "PeakPoint",
           "TimeEstimate"]
