"""How long collectives take: a fixed cost, a cost per step of the ring, and bytes over the narrowest link.

A ring all-gather or reduce-scatter of `nbytes` over n ranks sends (n - 1) / n of them through every link; an all-reduce is
both (Patarasuk and Yuan, 2009; NCCL's "bus bandwidth", nccl-tests/doc/PERFORMANCE.md). Between nodes every NIC carries its
own ring, so the node's whole network bandwidth counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.estimate.roofline import speeds
from toolkit.specs import Cluster


@dataclass(frozen=True)
class Group:
    """`ranks` ranks, `per_node` of them in each node that they span."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)


def group(cluster: Cluster, ranks: int, stride: int = 1) -> Group:
    """A group of `ranks` ranks that are `stride` apart: neighbours in a node for 1, one per node for its whole size."""
    return Group(ranks, max(1, min(ranks, cluster.gpus_per_node // stride)))


class Network:
    """Seconds of collectives on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        table = speeds()["collectives"]
        self.link = cluster.gpu.link_bandwidth * table["links"][cluster.gpu.link]
        self.between = cluster.network_bandwidth * table["network"]
        self.table = table
        self.step = table["step_in_node"][cluster.gpu.link]
        self.gpus_per_node = cluster.gpus_per_node

    def bandwidth(self, who: Group) -> float:
        """Bytes per second: the narrowest link of the ring. A group with few ranks in a node has its share of the NICs."""
        if who.nodes == 1:
            return self.link
        return min(self.link, self.between * who.per_node / self.gpus_per_node)

    def all_gather(self, nbytes: float, who: Group) -> float:
        """Seconds until every rank holds `nbytes`, of which each held its share. A reduce-scatter takes as long."""
        if who.ranks <= 1 or nbytes <= 0:
            return 0.0
        steps = (who.ranks - who.nodes) * self.step + (who.nodes - 1) * self.table["step_between_nodes"]
        return float(self.table["fixed"] + steps + nbytes * (who.ranks - 1) / who.ranks / self.bandwidth(who))

    def all_reduce(self, nbytes: float, who: Group) -> float:
        """Seconds until every rank holds the sum of `nbytes`."""
        return 2 * self.all_gather(nbytes, who)

    def slowdown(self, who: Group) -> float:
        """Share of computation lost while a collective of this group runs beside it."""
        return float(self.table["slows_computation"]["network" if who.nodes > 1 else "link"])
