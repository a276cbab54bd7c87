"""Estimate the candidates and choose: the lightest that fits, the fastest, or the one with the fewest GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.errors import UserError
from toolkit.estimate.engine import Estimator
from toolkit.estimate.result import Estimate
from toolkit.planner.candidates import Candidate, candidates, micro_batches
from toolkit.planner.ladder import ladder
from toolkit.specs import Cluster, ModelSpec, Workload
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
        """Per rung the candidates that were not needed: more aids than a plan of that rung that fits."""

    def evaluate(self, candidate: Candidate, *, detail: bool = False) -> Evaluated:
        """One candidate's estimate held against memory and margin."""
        self.estimates += 1
        try:
            estimate = self.estimator.estimate(candidate.workload, candidate.plan, candidate.cluster, detail=detail)
        except UserError as error:
            return Evaluated(candidate, None, False, str(error), detail)
        fits, why = _verdict(estimate, self.request.kept_free)
        return Evaluated(candidate, estimate, fits, why, detail)

    def with_micro_batch(self, candidate: Candidate, micro: int, accumulate: int) -> Candidate:
        work = candidate.workload.with_(micro_batch=micro, accumulate=accumulate)
        return replace(candidate, workload=work)

    def best_micro_batch(self, candidate: Candidate) -> Evaluated:
        """The fastest micro-batch that fits; without one, the smallest with what it misses by."""
        request = self.request
        choices = micro_batches(request.workload, candidate.cluster.world_size, request.global_batch, request.fixed_micro_batch)
        best: Evaluated | None = None
        first: Evaluated | None = None
        for micro, accumulate in choices:
            result = self.evaluate(self.with_micro_batch(candidate, micro, accumulate))
            first = first or result
            if not result.fits:
                break  # larger ones take more
            if best is None or result.speed > best.speed * 1.005 or (result.speed == best.speed == 0.0):
                best = result
        return best or first  # type: ignore[return-value]

    def smaller_that_fits(self, candidate: Candidate) -> Evaluated | None:
        """The largest smaller micro-batch of a candidate that fits, estimated in detail; None when there is none."""
        request, work = self.request, candidate.workload
        choices = micro_batches(request.workload, candidate.cluster.world_size, request.global_batch, request.fixed_micro_batch)
        for micro, accumulate in reversed([c for c in choices if c[0] < work.micro_batch]):
            result = self.evaluate(self.with_micro_batch(candidate, micro, accumulate), detail=True)
            if result.fits:
                return result
        return None

    def more_aids(self, candidate: Candidate) -> list[Evaluated]:
        """What was not needed on the candidate's rung, up to the first that fits; for when the candidate does not after all."""
        spare = self.spare.get((candidate.rung.strategy, candidate.cluster.world_size), [])
        found: list[Evaluated] = []
        while spare and not (found and found[-1].fits):
            found.append(self.best_micro_batch(spare.pop(0)))
        return found

    def run(self) -> list[Evaluated]:
        """The candidates, in the order of the ladder.

        Pruned are, and said to be: on a rung that fits, more aids (they cost speed and buy nothing); on a rung whose states
        alone exceed the memory, aids that only save activations, but for the strongest of them when nothing fits at all.
        """
        request = self.request
        results: list[Evaluated] = []
        hopeless: dict[object, list[Candidate]] = {}
        error: UserError | None = None
        for candidate in candidates(request.workload, request.cluster, engine=request.engine,
                                    allow_offload=request.allow_offload, every_count=request.prefer == "fewest-gpus"):
            rung = (candidate.rung.strategy, candidate.cluster.world_size)
            if any(r.fits and (r.candidate.rung.strategy, r.candidate.cluster.world_size) == rung for r in results):
                self.spare.setdefault(rung, []).append(candidate)
                continue
            if rung in hopeless and candidate.plan.offload == "none":
                hopeless[rung].append(candidate)
                continue
            self.progress(candidate.name)
            try:
                result = self.best_micro_batch(candidate)
            except UserError as problem:
                error = error or problem
                continue
            results.append(result)
            if result.estimate is not None and not result.fits and self._states_alone_exceed(result):
                hopeless[rung] = []
        if not results and error is not None:
            raise error
        if not any(r.fits for r in results):
            strongest = [skipped[-1] for skipped in hopeless.values() if skipped]
            results += [self.best_micro_batch(candidate) for candidate in strongest]
        return sorted(results, key=lambda r: r.candidate.order)

    def _states_alone_exceed(self, result: Evaluated) -> bool:
        """What is held between steps, gradients at the update included, is more than the GPU has."""
        memory = result.estimate.memory  # type: ignore[union-attr]
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
