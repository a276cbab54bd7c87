"""Every sensible plan for a workload on a cluster, lightest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.errors import UserError
from toolkit.planner.ladder import Aid, Rung, ladder
from toolkit.specs import Cluster, Plan, Workload

OFFLOAD_LEVELS = {"none": 0, "cpu": 1, "nvme": 2}


@dataclass(frozen=True)
class Candidate:
    """One plan with the workload and the part of the cluster that it uses."""

    rung: Rung
    aids: tuple[Aid, ...]
    plan: Plan
    workload: Workload
    cluster: Cluster
    order: int
    """Place on the ladder: equal for plans that differ in the micro-batch only."""

    @property
    def name(self) -> str:
        """Strategy and aids as tables show them."""
        label = self.plan.label + (f" ({self.plan.shard_size} to a copy)" if self.plan.shard_size else "")
        return " + ".join([label, *(a.name for a in self.aids if not {"offload", "tp", "cp", "sp"} & set(a.plan))])

    @property
    def family(self) -> tuple[str, int | None, int]:
        """What is pruned together: plans of one rung on as many GPUs, which differ in their aids."""
        return self.plan.strategy, self.plan.shard_size, self.cluster.world_size

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.cluster.world_size // (self.plan.tp * self.plan.cp * self.plan.sp)


def combinations(allow_offload: str, workload: Workload) -> list[tuple[Aid, ...]]:
    """The sets of aids that are tried on each rung, cheapest first.

    Loss and checkpointing are independent of each other; an offload comes on top of both.
    """
    chunked, selective, full, *offloads = ladder().aids
    losses: list[tuple[Aid, ...]] = [()] if workload.loss != "standard" else [(), (chunked,)]
    sets = [*losses, *((*extra, c) for c in (selective, full) for extra in losses)]
    level = OFFLOAD_LEVELS[allow_offload]
    for aid in offloads:
        if OFFLOAD_LEVELS[aid.offload] <= level:
            sets.append((aid,))
            sets.append((*((chunked,) if workload.loss == "standard" else ()), full, aid))
    return sets


def micro_batches(workload: Workload, world: int, global_batch: int | None, fixed: bool) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) to try on `world` data-parallel ranks.

    Raises:
        UserError: no micro-batch divides the global batch over the ranks.
    """
    if global_batch is None:
        if fixed:
            return [(workload.micro_batch, workload.accumulate)]
        return [(2**i, workload.accumulate) for i in range(7)]
    if global_batch % world:
        lower = global_batch // world * world
        near = f"{lower} or {lower + world}" if lower else f"{world}"
        raise UserError(f"global-batch {global_batch} does not divide over {world} ranks; the nearest that do: {near}")
    share = global_batch // world
    if fixed:
        if share % workload.micro_batch:
            raise UserError(f"global-batch {global_batch} over {world} ranks is {share} samples each, which "
                            f"micro-batch {workload.micro_batch} does not divide")
        return [(workload.micro_batch, share // workload.micro_batch)]
    return [(m, share // m) for m in range(1, min(share, 64) + 1) if share % m == 0]


def _cluster_of(rung: Rung, cluster: Cluster, gpus: int) -> Cluster | None:
    """The part of the cluster that a rung uses when it may use `gpus` GPUs; None: the rung does not apply."""
    nodes = max(1, gpus // cluster.gpus_per_node)
    if rung.scope == "device":
        return _part(cluster, 1, 1) if gpus == 1 else None
    if gpus == 1 or (rung.scope == "nodes" and nodes == 1) or (rung.scope == "node" and nodes > 1):
        return None
    return _part(cluster, min(gpus, cluster.gpus_per_node), nodes)


THREADS = 0.8
"""What a CPU process gains from another process's cores, per core: only large kernels run on several threads."""


def _part(cluster: Cluster, gpus: int, nodes: int) -> Cluster:
    """Some of the GPUs. Fewer CPU processes have more cores each."""
    gpu = cluster.gpu
    if gpu.is_cpu and gpus < cluster.gpus_per_node:
        times = 1 + THREADS * (cluster.gpus_per_node / gpus - 1)
        gpu = replace(gpu, fp32_flops=gpu.fp32_flops * times, bandwidth=gpu.bandwidth * times)
    return replace(cluster, gpu=gpu, gpus_per_node=gpus, nodes=nodes)


def gpu_counts(cluster: Cluster, every: bool) -> list[int]:
    """One GPU and all of them; with `every` also the powers of two and whole nodes between."""
    world = cluster.world_size
    counts = {1, world}
    if every:
        count = 2
        while count < cluster.gpus_per_node:
            counts.add(count)
            count *= 2
        counts.update(cluster.gpus_per_node * n for n in range(1, cluster.nodes + 1))
    return sorted(c for c in counts if c <= world)


def _rungs(engine: str) -> Iterator[Rung]:
    for rung in ladder().rungs:
        if engine == "fsdp" and rung.strategy.startswith("zero"):
            continue
        if engine == "deepspeed" and (rung.strategy.startswith("fsdp") or rung.strategy == "hsdp"):
            continue
        yield rung


def _bare_plans(rung: Rung, part: Cluster) -> list[Plan]:
    """The rung's plan; for hsdp one with a node to a copy, then several nodes to a copy."""
    plan = Plan(strategy=rung.strategy)  # type: ignore[arg-type]
    if rung.strategy != "hsdp":
        return [plan]
    sizes = [n * part.gpus_per_node for n in _powers(part.nodes - 1) if part.nodes % n == 0]
    return [plan, *(plan.with_(shard_size=size) for size in sizes)]


def _powers(limit: int) -> list[int]:
    """2, 4, 8 ... up to `limit`."""
    return [2**i for i in range(1, max(limit, 1).bit_length())]


def _candidate(rung: Rung, aids: tuple[Aid, ...], plan: Plan, work: Workload, part: Cluster, order: int) -> Candidate:
    for aid in aids:
        plan, work = plan.with_(**aid.plan), work.with_(**aid.workload)
    return Candidate(rung, aids, plan, work, part, order)


def candidates(
    workload: Workload, cluster: Cluster, *, engine: str = "any", allow_offload: str = "none", every_count: bool = False
) -> Iterator[Candidate]:
    """Plans in the order of the ladder, each with the workload's own micro-batch; every rank has its own samples.

    Args:
        engine: any, fsdp or deepspeed: which of the two sharding engines may be proposed.
        every_count: also use part of the GPUs.
    """
    order = 0
    sets = combinations(allow_offload, workload)
    for rung in _rungs(engine):
        for gpus in gpu_counts(cluster, every_count):
            part = _cluster_of(rung, cluster, gpus)
            if part is None:
                continue
            for plan in _bare_plans(rung, part):
                for aids in sets:
                    order += 1
                    yield _candidate(rung, aids, plan, workload, part, order)


def split_candidates(workload: Workload, cluster: Cluster, *, engine: str = "any") -> Iterator[Candidate]:
    """Plans in which several GPUs share a sample, for when none of `candidates` fits: fewest GPUs to a sample first.

    They come with all that saves activations on the GPU, and after every plan of `candidates`.
    """
    chunked, _, full, *_ = ladder().aids
    saving = (*((chunked,) if workload.loss == "standard" else ()), full)
    order = 1_000_000
    for split in ladder().splits:
        for rung in _rungs(engine):
            part = _cluster_of(rung, cluster, cluster.world_size)
            if part is None:
                continue
            for degree in _powers(part.gpus_per_node if split.scope == "node" else part.world_size):
                aid = Aid(f"{split.name} of {degree}", split.reason, plan={split.axis: degree})
                order += 1
                yield _candidate(rung, (*saving, aid), Plan(strategy=rung.strategy), workload, part, order)  # type: ignore[arg-type]
