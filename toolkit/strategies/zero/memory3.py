"""What DeepSpeed ZeRO-3 allocates: partitions, gathered modules, a permanent bucket, a flat gradient buffer.

Read from DeepSpeed 0.19.8 `deepspeed/runtime/zero/{stage3,parameter_offload,partitioned_param_coordinator,
partition_parameters}.py` and `deepspeed/runtime/comm/coalesced_collectives.py`. The first forward and backward record the
order of modules; from the second on parameters are prefetched and kept while they will be used again soon.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from toolkit.specs import Cluster, Plan, Workload
from toolkit.strategies.zero.launch import persistence
from toolkit.strategies.zero.memory import ZeroEngine
from toolkit.strategies.zero.nvme import Partition, place_optimizer, place_parameters
from toolkit.timeline.optimizers import OptimizerTensor, play_step, state_bytes
from toolkit.timeline.tape import Tape
from toolkit.timeline.trace import Mark, ModelTrace, ParameterInfo

NEVER = -(10**10)
GATHER_STREAM = 1


@dataclass
class Gathered:
    """One parameter's state on this rank."""

    info: ParameterInfo
    persistent: bool
    available: bool = False
    flight: Flight | None = None
    users: set[str] = field(default_factory=set)


@dataclass
class Flight:
    """One coalesced all-gather; its flat buffer lives until the last of its parameters was waited for."""

    name: tuple[str, int]
    members: list[Gathered]
    waiting: int
    copied: bool = False


class Zero3Engine(ZeroEngine):
    """Stage 3: parameters, gradients and states partitioned, modules gathered as they run."""

    def __init__(self, trace: ModelTrace, workload: Workload, plan: Plan, cluster: Cluster) -> None:
        super().__init__(trace, workload, plan, cluster)
        threshold = persistence(plan)
        self.parameters = {p.name: Gathered(p, p.numel <= threshold) for p in trace.parameters}
        self.of_module: dict[str, list[Gathered]] = {}
        for gathered in self.parameters.values():
            for module in gathered.info.modules:
                self.of_module.setdefault(module, []).append(gathered)
        self.no_release = trace.inputs_without_gradient
        self.recorded: list[str] = []
        """Modules in the order of their fetches, forward and backward."""
        self.complete = False
        self.started = False
        self.uses: dict[str, list[int]] = {}
        """Fetches at which each parameter is used."""
        self.passed: list[int] = []
        """Elements that were used before each fetch."""
        self.order: list[tuple[Gathered, int]] = []
        """Every use of every parameter, in order, with its fetch."""
        self.at = 0
        self.available = 0
        self.queue: deque[tuple[Gathered, int]] = deque()
        self.fetched_for: dict[str, int] = {}
        self.flights = 0
        self.contiguous = self.settings.contiguous_gradients is not False
        """Gradients wait for their reduction in a buffer that is always there; else where they lie (`contiguous_gradients`)."""
        self.bucket: list[str] = []
        self.elements = 0
        self.param_offload = plan.offload == "all"
        # with overlap_comm gathering has a stream of its own, and so a pool; what is freed there waits for the computing stream
        self.gather_stream = GATHER_STREAM if self.overlap and self.device == "cuda" else 0

    @staticmethod
    def wants(trace: ModelTrace) -> Callable[[Mark], bool]:
        """Every mark: modules without parameters prefetch too."""
        return lambda _: True

    # -- sizes -------------------------------------------------------------------------------------------------

    def part(self, p: ParameterInfo) -> int:
        """Elements of one partition."""
        return -(-p.numel // self.world)

    def whole(self, p: ParameterInfo) -> int:
        """Bytes of the gathered parameter with its padding."""
        return self.part(p) * self.world * self.size_of(p)

    # -- before the first step ---------------------------------------------------------------------------------

    def setup(self, tape: Tape) -> None:
        trainable = sum(self.part(p) for p in self.trace.trainable)
        frozen = sum(self.part(p) * self.size_of(p) for p in self.trace.parameters if not p.trainable)
        weights = trainable * self.weight_size
        host = self.device != "cpu"
        swap = host and self.plan.offload_to == "nvme"
        if self.param_offload and swap:
            place_parameters(self.host, *self._partitions())
        elif self.param_offload and host:
            self.host.pinned.append(weights) if self.settings.pin_memory else None
            self.host.plain += frozen + (0 if self.settings.pin_memory else weights)
        else:
            tape.alloc("partitions", weights, "parameters", "parameter partitions")
            tape.alloc("frozen", frozen, "parameters", "frozen parameter partitions")
        if self.offload and host:
            pinned = [trainable * self.accumulation_size, 0 if swap else trainable * 4]
            if swap:
                self._place(self.host.pinned if self.settings.pin_memory else None, pinned[0])
                kept, _ = state_bytes(self.workload.optimizer, OptimizerTensor(4096, 4, (4096,)), "cpu", self.impl)
                place_optimizer(self.host, self.sub_groups(), sum(kept) // (4096 * 4))
            elif self.settings.pin_memory:
                self.host.pinned += pinned
                self.host.plain += trainable * 12
            else:
                self.host.plain += sum(pinned) + trainable * 12
        else:
            tape.alloc("master", trainable * 4, "master_weights", "fp32 partitions")
            tape.alloc("flat-gradients", trainable * self.accumulation_size, "gradients", "gradient partitions")
        if self.contiguous:
            tape.alloc("bucket", self.bucket_size * self.weight_size, "communication", "reduce bucket")
        tape.alloc("buffers", self.trace.buffers, "parameters", "buffers")
        tape.alloc("batch", self.trace.batch, "activations", "inputs")

    def _place(self, pinned: list[int] | None, nbytes: int) -> None:
        if pinned is None:
            self.host.plain += nbytes
        else:
            pinned.append(nbytes)

    def _partitions(self) -> tuple[list[Partition], list[Partition]]:
        """All parameters as partitions, and those of the sub-group that holds most."""
        every = [Partition(p.numel, self.part(p), self.size_of(p), p.trainable) for p in self.trace.parameters]
        groups, count, limit = [[]], 0, int(self.settings.sub_group_size or 10**9)  # type: list[list[Partition]], int, int
        for one in (p for p in every if p.trainable):
            groups[-1].append(one)
            count += one.part
            if count >= limit:
                groups.append([])
                count = 0
        return every, max(groups, key=lambda group: sum(p.part for p in group))

    def notes(self) -> list[str]:
        found = super().notes()
        if self.plan.offload != "none" and self.plan.offload_to == "nvme" and self.device == "cpu":
            found.append("on a CPU what goes to NVMe is counted as if it stayed in memory")
        return found

    # -- gathering ---------------------------------------------------------------------------------------------

    def _gather(self, tape: Tape, wanted: list[Gathered]) -> None:
        """__all_gather_params: one parameter straight into its own tensor, several through one flat tensor."""
        wanted = [g for g in wanted if not g.available and g.flight is None]
        if not wanted:
            return
        self.available += sum(g.info.numel for g in wanted)
        if self.world == 1:
            for g in wanted:
                g.available = True
            return
        if len(wanted) == 1:
            g = wanted[0]
            tape.alloc(("gathered", g.info.name), self.whole(g.info), "parameters", f"gathered {g.info.name}", self.gather_stream)
            self._gloos_copy(tape, self.whole(g.info))
            g.available = True
            return
        self.flights += 1
        flight = Flight(("flight", self.flights), wanted, len(wanted))
        nbytes = sum(self.whole(g.info) for g in wanted)
        tape.alloc(flight.name, nbytes, "communication", "coalesced all-gather", self.gather_stream)
        self._gloos_copy(tape, nbytes)
        for g in wanted:
            g.flight = flight

    def _gloos_copy(self, tape: Tape, nbytes: int) -> None:
        """gloo gathers into a flat copy of the output (ProcessGroupGloo.cpp, `newLikeFlat`)."""
        if self.device == "cpu":
            tape.transient(nbytes, "communication", "gloo's copy of what is gathered")

    def _wait(self, tape: Tape, g: Gathered) -> None:
        flight = g.flight
        if flight is None:
            return
        if not flight.copied:
            flight.copied = True
            for member in flight.members:
                nbytes = member.info.numel * self.size_of(member.info)
                tape.alloc(("gathered", member.info.name), nbytes, "parameters", f"gathered {member.info.name}",
                           self.gather_stream)
                member.available = True
        g.flight = None
        flight.waiting -= 1
        if flight.waiting == 0:
            tape.free(flight.name)

    def _release(self, tape: Tape, g: Gathered) -> None:
        if g.available and not g.users:
            g.available = False
            self.available -= g.info.numel
            tape.free(("gathered", g.info.name), lags=bool(self.gather_stream))

    def _fetch(self, tape: Tape, module: str) -> None:
        """fetch_sub_module"""
        needed = self.of_module.get(module, [])
        if not self.complete:
            self.recorded.append(module)
        if needed:
            self._gather(tape, needed)
            for g in needed:
                g.users.add(module)
                self._wait(tape, g)
        if self.complete:
            self._prefetch(tape, needed)
        self.at += 1

    def _prefetch(self, tape: Tape, needed: list[Gathered]) -> None:
        fresh = sum(1 for g in needed if self.fetched_for.get(g.info.name, NEVER) < self.at)
        for _ in range(min(fresh, len(self.queue))):
            g, last = self.queue.popleft()
            self.fetched_for[g.info.name] = last
        room = min(int(self.settings.max_live_parameters or 0) - self.available, int(self.settings.prefetch_bucket or 0))
        chosen: list[Gathered] = []
        numel = 0
        while self.queue and numel < room:
            g, last = self.queue.popleft()
            self.fetched_for[g.info.name] = max(self.fetched_for.get(g.info.name, NEVER), last)
            if not g.available and g.flight is None and g not in chosen:
                chosen.append(g)
                numel += g.info.numel
        self._gather(tape, chosen)

    def _leave(self, tape: Tape, module: str) -> None:
        """release_sub_module: at once while the order is recorded, later only what is not used again soon."""
        mine = self.of_module.get(module)
        if not mine:
            return
        keep: set[str] = set()
        if self.complete:
            keep = {g.info.name for g in mine
                    if g.persistent or self.fetched_for.get(g.info.name, NEVER) > self.at or self._again_soon(g)}
        for g in mine:
            g.users.discard(module)
            if g.info.name not in keep:
                self._release(tape, g)

    def _again_soon(self, g: Gathered) -> bool:
        """Whether it is used again within `max_reuse_distance` elements of what will run next."""
        uses = self.uses[g.info.name]
        at = bisect_left(uses, self.at)
        if at == len(uses):
            return False
        return self.passed[uses[at]] - self.passed[self.at] < int(self.settings.max_reuse_distance or 0)

    def _order_is_known(self) -> None:
        """The recorded order, as what is needed to look ahead in it."""
        self.complete = True
        self.uses = {name: [] for name in self.parameters}
        self.passed = [0]
        for step, module in enumerate(self.recorded):
            for g in self.of_module.get(module, ()):
                self.uses[g.info.name].append(step)
                self.order.append((g, step))
            self.passed.append(self.passed[-1] + sum(g.info.numel for g in self.of_module.get(module, ())))

    # -- marks -------------------------------------------------------------------------------------------------

    def micro_begins(self, tape: Tape, first: bool, last: bool) -> None:
        """reset_step, in the root's forward"""
        super().micro_begins(tape, first, last)
        for g in self.parameters.values():
            if g.flight is not None:
                self._wait(tape, g)
                self._release(tape, g)
        if self.started and not self.complete:
            self._order_is_known()
        self.started = True
        self.queue = deque(self.order)
        self.fetched_for.clear()
        self.at = 0
        self.available = 0

    def forward_begin(self, tape: Tape, module: str) -> None:
        self._fetch(tape, module)

    def forward_end(self, tape: Tape, module: str) -> None:
        self._leave(tape, module)

    def backward_begin(self, tape: Tape, module: str) -> None:
        self._fetch(tape, module)

    def backward_end(self, tape: Tape, module: str) -> None:
        if module not in self.no_release:
            self._leave(tape, module)

    def gradient(self, tape: Tape, mark: Mark) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads"""
        super().gradient(tape, mark)
        info = self.by_name.get(mark.name)
        if info is None:
            return
        if self.elements + info.numel > self.bucket_size and self.elements > 0:
            self._reduce(tape)
        if self.contiguous and self.elements + info.numel <= self.bucket_size:
            self.drop_gradient(tape, mark.name)
        self.bucket.append(mark.name)
        self.elements += info.numel

    def _reduce(self, tape: Tape) -> None:
        """__reduce_and_partition_ipg_grads: interleave, reduce-scatter, add to the partitions."""
        if not self.bucket:
            return
        infos = [self.by_name[name] for name in self.bucket]
        padded = sum(self.part(p) for p in infos) * self.world * self.weight_size
        if not (len(infos) == 1 and infos[0].numel % self.world == 0):
            tape.alloc("interleaved", padded, "communication", "interleaved reduce bucket")
        if self.device == "cpu":
            tape.transient(padded, "communication", "gloo's copy of the reduce bucket")
        if self.accumulation_size != self.weight_size:
            tape.transient(sum(self.part(p) for p in infos) * self.accumulation_size, "gradients", "cast gradient partitions")
        for name in self.bucket:
            if name in self.gradients:
                self.drop_gradient(tape, name)
        tape.free("interleaved")
        self.bucket.clear()
        self.elements = 0

    def backward_done(self, tape: Tape) -> None:
        self._reduce(tape)
        for module in self.no_release:
            for g in self.of_module.get(module, ()):
                g.users.discard(module)
                if not g.persistent:
                    self._release(tape, g)

    # -- optimizer ---------------------------------------------------------------------------------------------

    def sub_groups(self) -> list[int]:
        """Elements of each sub-group: parameters are taken until `sub_group_size` is reached."""
        limit = int(self.settings.sub_group_size or 10**9)
        parts = [self.part(p) for p in self.trace.trainable]
        if limit >= sum(parts):
            return [sum(parts)] if parts else []
        groups, current = [], 0
        for size in parts:
            current += size
            if current >= limit:
                groups.append(current)
                current = 0
        return [*groups, current] if current else groups

    def optimizer_tensors(self) -> list[OptimizerTensor]:
        return [OptimizerTensor(numel, 4, (numel,)) for numel in self.sub_groups()]

    def step(self, tape: Tape) -> None:
        """Everything gathered is released, then one sub-group after the other is updated."""
        for g in self.parameters.values():
            if g.flight is not None:
                self._wait(tape, g)
            g.users.clear()
            self._release(tape, g)
        tensors = self.optimizer_tensors()
        if not self.offload and self.trace.trainable:
            # get_grad_norm_direct casts one gradient after the other to fp64
            tape.transient(8 * max(self.part(p) for p in self.trace.trainable), "temporaries", "a gradient in fp64, for its norm")
        if not self.offload or self.device == "cpu":
            first = not self.has_states
            self.has_states = True
            for i, tensor in enumerate(tensors):
                if not self.offload:
                    tape.alloc(("fp32-gradient", i), tensor.numel * 4, "gradients", "flat fp32 gradient of a sub-group")
                if first:
                    self.create_state(tape, i, tensor)
                if not self.offload:
                    play_step(tape, [tensor], self.workload.optimizer, self.impl)
                tape.free(("fp32-gradient", i))
        if self.world > 1:
            for g in self.parameters.values():
                if g.persistent:
                    g.available = True
                    tape.alloc(("gathered", g.info.name), self.whole(g.info), "parameters", f"gathered {g.info.name}")
