"""The vocabulary: model, workload, cluster and plan as plain frozen data."""

from toolkit.specs.cluster import Cluster, Gpu
from toolkit.specs.model import ModelSpec
from toolkit.specs.plan import DdpSettings, FsdpSettings, Plan, ZeroSettings
from toolkit.specs.variant import Variant
from toolkit.specs.workload import Workload

__all__ = ["Cluster", "DdpSettings", "FsdpSettings", "Gpu", "ModelSpec", "Plan", "Variant", "Workload",
           "ZeroSettings"]
