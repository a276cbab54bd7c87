"""Estimate the candidates and choose: the lightest that fits, the fastest, or the one with the fewest GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.errors import UserError
from toolkit.estimate.engine import Estimator
from toolkit.estimate.result import Estimate
from toolkit.planner.candidates import Candidate, candidates, micro_batches, split_candidates
from toolkit.planner.ladder import ladder
from toolkit.specs import Cluster, ModelSpec, Workload
from toolkit.strategies import check_plan
from toolkit.strategies.zero.defaults import engine_defaults
from toolkit.units import format_size

ALIKE = 0.10
"""Predicted speeds nearer than this are taken for equal, and the lighter plan wins. The time model is within 6% in the median and
17% in nine of ten published figures (benchmarks/throughput.py)."""

Prefer = Literal["lightest", "fastest", "fewest-gpus"]


@dataclass(frozen=True)
class Request:
    """What is asked of the planner."""

    model: ModelSpec
    workload: Workload
    cluster: Cluster
    prefer: Prefer = "lightest"
    engine: Literal["any", "fsdp", "deepspeed"] = "any"
    allow_offload: Literal["none", "cpu", "nvme"] = "none"
    global_batch: int | None = None
    fixed_micro_batch: bool = False
    """True: the workload's micro-batch was asked for; False: it is searched."""
    margin: float | None = None
    """Share of the GPU kept free; None: the ladder's."""

    @property
    def kept_free(self) -> float:
        if self.margin is not None:
            return self.margin
        return ladder().margin_cpu if self.cluster.gpu.is_cpu else ladder().margin_gpu


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its estimate, or with the reason why it is impossible."""

    candidate: Candidate
    estimate: Estimate | None
    fits: bool
    why: str
    detailed: bool = False
    """Whether the allocator was replayed event by event; what is recommended always was."""

    @property
    def speed(self) -> float:
        """Tokens per second of the whole job; 0 when unknown."""
        return self.estimate.time.tokens_per_second if self.estimate and self.estimate.time else 0.0


def _verdict(estimate: Estimate, margin: float) -> tuple[bool, str]:
    memory = estimate.memory
    limit = int(memory.capacity * (1 - margin))
    if memory.peak_total > limit:
        return False, f"misses by {format_size(memory.peak_total - limit)} ({memory.at_peak.phase})"
    if not memory.host.fits:
        return False, f"host memory: needs {format_size(memory.host.peak)}, has {format_size(memory.host.capacity or 0)}"
    return True, f"{format_size(limit - memory.peak_total)} to spare"


class Search:
    """Evaluates candidates; traces are shared between them."""

    def __init__(self, request: Request, progress: Callable[[str], None] | None = None) -> None:
        self.request = request
        self.estimator = Estimator(request.model)
        self.progress = progress or (lambda _: None)
        self.estimates = 0
        self.spare: dict[object, list[Candidate]] = {}
        """Per family the candidates that were not needed: more aids than a plan of that family that fits."""
        self.pruned: dict[str, int] = {}
        self.impossible: UserError | None = None
        """Why the first candidate that is no plan of this workload and cluster is none."""
        self.undivided: UserError | None = None
        """Why the first candidate whose ranks don't divide the global batch has no micro-batch."""

    def evaluate(self, candidate: Candidate, *, detail: bool = False) -> Evaluated:
        """One candidate's estimate held against memory and margin."""
        self.estimates += 1
        try:
            estimate = self.estimator.estimate(candidate.workload, candidate.plan, candidate.cluster, detail=detail)
        except UserError as error:
            return Evaluated(candidate, None, False, str(error), detail)
        fits, why = _verdict(estimate, self.request.kept_free)
        return Evaluated(candidate, estimate, fits, why, detail)

    def _with_buckets(self, candidate: Candidate) -> Candidate:
        """DeepSpeed allocates its reduce bucket whole, however small the model: one as large as what is trained is enough."""
        plan = candidate.plan
        if not plan.strategy.startswith("zero"):
            return candidate
        trained = sum(p.numel for p in self.estimator.trace(candidate.workload, plan, candidate.cluster).trainable)
        if trained >= engine_defaults()["reduce_bucket_size"]:
            return candidate
        return replace(candidate, plan=plan.with_(zero=replace(plan.zero, reduce_bucket=trained)))

    def with_micro_batch(self, candidate: Candidate, micro: int, accumulate: int) -> Candidate:
        work = candidate.workload.with_(micro_batch=micro, accumulate=accumulate)
        return replace(candidate, workload=work)

    def best_micro_batch(self, candidate: Candidate) -> Evaluated:
        """The fastest micro-batch that fits; without one, the smallest with what it misses by."""
        request = self.request
        choices = micro_batches(request.workload, candidate.data_ranks, request.global_batch, request.fixed_micro_batch)
        best: Evaluated | None = None
        first: Evaluated | None = None
        lines: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for micro, accumulate in choices:
            peaks = lines[accumulate > 1]  # Gradients that are kept between micro-batches make another line.
            if self._is_too_large(micro, peaks, candidate.cluster.gpu.memory):
                break
            result = self.evaluate(self.with_micro_batch(candidate, micro, accumulate))
            first = first or result
            if not result.fits or result.estimate is None:
                break  # larger ones take more
            peaks.append((micro, result.estimate.memory.peak_allocated))
            if best is None or result.speed > best.speed * 1.005 or (result.speed == best.speed == 0.0):
                best = result
        return best or first  # type: ignore[return-value]

    def _is_too_large(self, micro: int, peaks: list[tuple[int, int]], capacity: int) -> bool:
        """Whether the peaks at two smaller micro-batches say so: a peak is the highest of sums that are linear in the
        micro-batch, so it grows at least as fast from there on."""
        if len(peaks) < 2:
            return False
        (one, low), (two, high) = peaks[-2:]
        return high + (high - low) * (micro - two) / (two - one) > capacity * (1 - self.request.kept_free)

    def smaller_that_fits(self, candidate: Candidate) -> Evaluated | None:
        """The largest smaller micro-batch of a candidate that fits, estimated in detail; None when there is none."""
        request, work = self.request, candidate.workload
        choices = micro_batches(request.workload, candidate.data_ranks, request.global_batch, request.fixed_micro_batch)
        for micro, accumulate in reversed([c for c in choices if c[0] < work.micro_batch]):
            result = self.evaluate(self.with_micro_batch(candidate, micro, accumulate), detail=True)
            if result.fits:
                return result
        return None

    def more_aids(self, candidate: Candidate) -> list[Evaluated]:
        """What was not needed on the candidate's rung, up to the first that fits; for when the candidate does not after all."""
        spare = self.spare.get(candidate.family, [])
        found: list[Evaluated] = []
        while spare and not (found and found[-1].fits):
            if (result := self._tried(spare.pop(0))) is not None:
                found.append(result)
        return found

    def run(self) -> list[Evaluated]:
        """The candidates, in the order of the ladder.

        Pruned are, and counted in `pruned`: on a rung that fits, more aids (they cost speed and buy nothing); on a rung whose
        states alone exceed the memory, aids that only save activations, but for the strongest of them when nothing fits at all.

        Raises:
            UserError: no plan can be tried, or none fits and there are some that do not divide the global batch.
        """
        request = self.request
        results: list[Evaluated] = []
        fitting: set[object] = set()
        hopeless: dict[object, list[Candidate]] = {}
        for candidate in candidates(request.workload, request.cluster, engine=request.engine,
                                    allow_offload=request.allow_offload, every_count=request.prefer == "fewest-gpus"):
            family = candidate.family
            if not self._possible(candidate):
                continue
            if family in fitting:
                self.spare.setdefault(family, []).append(candidate)
                continue
            if family in hopeless and candidate.plan.offload == "none":
                hopeless[family].append(candidate)
                continue
            result = self._tried(candidate)
            if result is None:
                continue
            results.append(result)
            if result.fits:
                fitting.add(family)
            elif self._states_alone_exceed(result):
                hopeless[family] = []
        if not fitting:
            strongest = [skipped.pop() for skipped in hopeless.values() if skipped]
            results += [result for candidate in strongest if (result := self._tried(candidate))]
            if self.undivided is not None and not any(r.fits for r in results):
                raise self.undivided
            results += self._split()
        self.pruned = self._count_pruned(hopeless)
        if not results and self.impossible is not None:
            raise self.impossible
        if results and not any(r.estimate for r in results):
            raise UserError(results[0].why)
        return sorted(results, key=lambda r: r.candidate.order)

    def _possible(self, candidate: Candidate) -> bool:
        try:
            check_plan(candidate.plan, candidate.workload, candidate.cluster)
        except UserError as error:
            self.impossible = self.impossible or error
            return False
        return True

    def _tried(self, candidate: Candidate) -> Evaluated | None:
        """The candidate with its best micro-batch; None when its ranks do not divide the global batch, or the model has not what
        an aid takes (activation checkpointing, an output layer)."""
        self.progress(candidate.name)
        try:
            candidate = self._with_buckets(candidate)
        except UserError as error:
            result = Evaluated(candidate, None, False, str(error))
        else:
            try:
                result = self.best_micro_batch(candidate)
            except UserError as error:
                self.undivided = self.undivided or error
                return None
        return None if result.estimate is None and candidate.aids else result

    def _split(self) -> list[Evaluated]:
        """Plans in which GPUs share a sample: for each rung and kind of split the first degree that fits, else the last."""
        request = self.request
        found: dict[object, Evaluated] = {}
        for candidate in split_candidates(request.workload, request.cluster, engine=request.engine):
            kind = (candidate.family, *candidate.aids[-1].plan)
            if not self._possible(candidate) or (kind in found and found[kind].fits):
                continue
            result = self._tried(candidate)
            if result is not None and result.estimate is not None:
                found[kind] = result
        return list(found.values())

    def _count_pruned(self, hopeless: dict[object, list[Candidate]]) -> dict[str, int]:
        """Plans that were not estimated, by the reason."""
        dearer, useless = (sum(len(left) for left in kind.values()) for kind in (self.spare, hopeless))
        return {reason: count for reason, count in (
            ("more aids than a lighter plan of the same strategy that fits needs", dearer),
            ("aids that save activations, where what is held between steps is too much already", useless),
        ) if count}

    def _states_alone_exceed(self, result: Evaluated) -> bool:
        """What is held between steps, gradients at the update included, is more than the GPU has."""
        if result.estimate is None:
            return False
        memory = result.estimate.memory
        return memory.resident + memory.outside_allocator > memory.capacity * (1 - self.request.kept_free)


def choose(results: list[Evaluated], prefer: Prefer) -> Evaluated | None:
    """The plan to recommend among those that fit; None when none does."""
    fitting = [r for r in results if r.fits]
    if not fitting:
        return None
    if prefer == "fastest":
        best = max(r.speed for r in fitting)
        return min((r for r in fitting if r.speed >= best * (1 - ALIKE)), key=lambda r: r.candidate.order)
    if prefer == "fewest-gpus":
        return min(fitting, key=lambda r: (r.candidate.cluster.world_size, r.candidate.order))
    lightest = min(fitting, key=lambda r: r.candidate.order)
    peers = [r for r in fitting if _class(r) == _class(lightest)]
    return min(peers, key=lambda r: (-(r.speed or 0), r.candidate.order)) if len(peers) > 1 and lightest.speed else lightest


_CLASSES = {"zero2": "gradients", "fsdp-grad": "gradients", "fsdp": "everything", "zero3": "everything"}


def _class(result: Evaluated) -> tuple[str, tuple[str, ...]]:
    """Plans of one class have as many moving parts: fsdp and zero3 with the same aids, say."""
    strategy = result.candidate.plan.strategy
    return _CLASSES.get(strategy, strategy), tuple(a.name for a in result.candidate.aids)
