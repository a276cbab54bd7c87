"""The recommendation: what to run, why, what else was near, and what would help when nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.errors import UserError
from toolkit.estimate.result import Estimate
from toolkit.planner.search import Evaluated, Request, Search, choose
from toolkit.specs import Plan
from toolkit.units import format_count, format_duration, format_size


@dataclass(frozen=True)
class Change:
    """One change to the request that an estimate showed to help."""

    what: str
    option: str
    """How to ask for it on the command line."""
    fits: bool
    short: int
    """Bytes that are still missing; 0 when it fits."""


@dataclass(frozen=True)
class Recommendation:
    """The answer to one request."""

    request: Request
    chosen: Evaluated | None
    results: list[Evaluated]
    one_gpu: str
    """Whether one GPU is enough, and for what."""
    reason: str
    alternatives: list[tuple[Evaluated, str]] = field(default_factory=list)
    """Up to three others that fit, with what each trades."""
    changes: list[Change] = field(default_factory=list)
    closest: Evaluated | None = None
    pruned: dict[str, int] = field(default_factory=dict)
    """Plans that were not estimated, by the reason."""
    files: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The contract's object: recommended, candidates (lightest first), reason, alternatives, files."""
        return {
            "schema": 1,
            "recommended": _json(self.chosen),
            "reason": self.reason,
            "one_gpu": self.one_gpu,
            "candidates": [_json(r) for r in self.results],
            "alternatives": [{**(_json(r) or {}), "trade": trade} for r, trade in self.alternatives],
            "changes": [vars(c) for c in self.changes],
            "closest": _json(self.closest),
            "pruned": self.pruned,
            "files": self.files,
        }


def _json(result: Evaluated | None) -> dict[str, Any] | None:
    if result is None:
        return None
    name = {"name": result.candidate.name, "fits_with_margin": result.fits, "why": result.why,
            "strategy": result.candidate.plan.strategy, "aids": [a.name for a in result.candidate.aids]}
    return {**name, **(result.estimate.to_json() if result.estimate else {})}


def recommend(request: Request, *, tokens: int | None = None, progress: Callable[[str], None] | None = None) -> Recommendation:
    """Search, choose, explain.

    Args:
        tokens: training tokens of the whole run; with it the answer speaks of time.

    Raises:
        UserError: the request is impossible on any plan (a global batch that no rank count divides, say).
    """
    search = Search(request, progress)
    results = search.run()
    chosen, results = _checked_choice(search, results)
    one_gpu = _one_gpu(search, results, tokens)
    if chosen is None:
        closest, results = _closest(search, results)
        return Recommendation(request, None, results, one_gpu, _why_not(closest), changes=_changes(search, closest),
                              closest=closest, pruned=search.pruned)
    return Recommendation(request, chosen, results, one_gpu, _why(chosen, results, request, tokens),
                          _alternatives(chosen, results), pruned=search.pruned)


def _in_detail(search: Search, result: Evaluated, results: list[Evaluated]) -> tuple[Evaluated, list[Evaluated]]:
    """The candidate again, with the allocator replayed event by event, and the results with it in the old one's place."""
    checked = search.evaluate(result.candidate, detail=True)
    return checked, [checked if r is result else r for r in results]


def _checked_choice(search: Search, results: list[Evaluated]) -> tuple[Evaluated | None, list[Evaluated]]:
    """The choice that still fits when it is estimated in detail: the allocator's rounding may tip one that just fitted.

    Before a plan is given up, its smaller micro-batches are tried, then more aids on its rung.
    """
    while (chosen := choose(results, search.request.prefer)) is not None:
        if chosen.detailed:
            return chosen, results
        detailed, results = _in_detail(search, chosen, results)
        if not detailed.fits:
            smaller = search.smaller_that_fits(detailed.candidate)
            if smaller is not None:
                results = [smaller if r is detailed else r for r in results]
            else:
                results = sorted([*results, *search.more_aids(detailed.candidate)], key=lambda r: r.candidate.order)
    return None, results


def _closest(search: Search, results: list[Evaluated]) -> tuple[Evaluated | None, list[Evaluated]]:
    """The plan that misses by the least when it is estimated in detail."""
    while True:
        near = min((r for r in results if r.estimate), key=lambda r: _short(r, search.request), default=None)
        if near is None or near.detailed:
            return near, results
        _, results = _in_detail(search, near, results)


def _short(result: Evaluated, request: Request) -> int:
    """Bytes that are missing, the margin counted; 0 when the plan fits."""
    memory = result.estimate.memory if result.estimate else None
    if memory is None:
        return 1 << 62
    host = memory.host.peak - memory.host.capacity if memory.host.capacity else 0
    return max(0, memory.peak_total - int(memory.capacity * (1 - request.kept_free)), host)


def _one_gpu(search: Search, results: list[Evaluated], tokens: int | None) -> str:
    """The first lines: is one GPU enough for the memory, and how long would it take."""
    unit = "process" if search.request.cluster.gpu.is_cpu else "GPU"
    alone = [r for r in results if r.candidate.plan.strategy == "single"]
    fitting = next((r for r in alone if r.fits), None)
    if fitting is None:
        near = min((r for r in alone if r.estimate), key=lambda r: _short(r, search.request), default=None)
        short = f" (the lightest single-{unit} plan {near.why})" if near else ""
        return f"One {unit} is not enough for the memory{short}."
    aids = " with " + " and ".join(a.name for a in fitting.candidate.aids) if fitting.candidate.aids else ""
    text = f"One {unit} is enough for the memory{aids}: {_total(fitting)} of {_capacity(fitting)}."
    if tokens and fitting.speed:
        text += f" It would take {format_duration(tokens / fitting.speed)} for {format_count(tokens)} tokens."
    return text


def _total(result: Evaluated) -> str:
    return format_size(result.estimate.memory.peak_total) if result.estimate else "?"


def _capacity(result: Evaluated) -> str:
    return format_size(result.estimate.memory.capacity) if result.estimate else "?"


def _why(chosen: Evaluated, results: list[Evaluated], request: Request, tokens: int | None) -> str:
    candidate = chosen.candidate
    world = candidate.cluster.world_size
    unit = "process" if request.cluster.gpu.is_cpu else "GPU"
    parts = [f"{candidate.name} on {world} {unit}{'es' if unit == 'process' and world > 1 else 's' if world > 1 else ''}"]
    parts.append(candidate.rung.reason)
    parts += [f"{a.name}: {a.reason}" for a in candidate.aids]
    if world > 1:
        alone = next((r for r in results if r.candidate.plan.strategy == "single" and r.fits), None)
        parts.append("distributed because one is not enough for the memory" if alone is None
                     else "distributed because of the time, not of the memory")
    elif request.cluster.world_size > 1:
        parts.append("the other GPUs are not needed")
    if candidate.data_ranks < world:
        parts.append("recipes/train.py gives every rank samples of its own: the launch file is for a loop of yours "
                     "(docs/own-script.md)")
    if tokens and chosen.speed:
        parts.append(f"about {format_duration(tokens / chosen.speed)} for {format_count(tokens)} tokens")
    return "; ".join(parts)


def _why_not(closest: Evaluated | None) -> str:
    if closest is None or closest.estimate is None:
        return "nothing fits, and no plan could be estimated"
    memory = closest.estimate.memory
    term = max(memory.breakdown, key=lambda c: memory.breakdown[c])
    return (f"nothing fits; the closest is {closest.candidate.name}: {format_size(memory.peak_total)} of "
            f"{format_size(memory.capacity)} at {memory.at_peak.phase}, {closest.why}; the largest term is "
            f"{term.replace('_', ' ')} with {format_size(memory.breakdown[term])}")


def _alternatives(chosen: Evaluated, results: list[Evaluated]) -> list[tuple[Evaluated, str]]:
    others = [r for r in results if r.fits and r.candidate != chosen.candidate and r.estimate and chosen.estimate]
    others.sort(key=lambda r: (-r.speed, r.candidate.order))
    out = []
    for other in others[:3]:
        saved = chosen.estimate.memory.peak_total - other.estimate.memory.peak_total  # type: ignore[union-attr]
        trade = f"{format_size(abs(saved))} {'less' if saved > 0 else 'more'} per GPU"
        if chosen.speed and other.speed:
            trade += f", {other.speed / chosen.speed:.2f}x the speed"
        out.append((other, trade))
    return out


def _changes(search: Search, closest: Evaluated | None) -> list[Change]:
    """The smallest changes that would help, each verified by an estimate of the closest plan with it."""
    if closest is None:
        return []
    base, request = closest.candidate, search.request
    work = base.workload
    tries: list[tuple[str, str, Any]] = []
    if request.fixed_micro_batch and work.micro_batch > 1:
        micro = _halved(search, closest)
        tries.append((f"micro-batch {micro.workload.micro_batch}", f"--micro-batch {micro.workload.micro_batch}", micro))
    if work.loss == "standard":
        tries.append(("chunked loss", "--loss chunked", replace(base, workload=work.with_(loss="chunked"))))
    if work.seq_len > 512:
        half = work.seq_len // 2
        tries.append((f"sequence length {half}", f"--seq-len {half}", replace(base, workload=work.with_(seq_len=half))))
    if work.optimizer == "adamw":
        tries.append(("8-bit optimizer", "--optimizer adamw-8bit", replace(base, workload=work.with_(optimizer="adamw-8bit"))))
    if work.method == "full":
        tries.append(("LoRA", "--method lora", replace(base, workload=work.with_(method="lora"))))
    if work.method != "qlora" and not request.cluster.gpu.is_cpu:
        tries.append(("QLoRA", "--method qlora", replace(base, workload=work.with_(method="qlora"))))
    if request.allow_offload == "none" and base.plan.strategy in ("zero2", "zero3", "fsdp"):
        offload = "optimizer" if base.plan.strategy != "fsdp" else "all"
        tries.append((f"offload of {offload}", "--allow-offload cpu", replace(base, plan=base.plan.with_(offload=offload))))
    tries += _more_gpus(base)
    tries += _larger_gpu(base)
    out = []
    for what, option, candidate in tries:
        result = search.evaluate(candidate)
        if result.estimate is None:  # The closest plan's engine can't: 4 bits under ZeRO-3, 8-bit states under FSDP2.
            result = search.evaluate(_in_another_engine(candidate))
        if result.estimate is not None:
            out.append(Change(what, option, result.fits, 0 if result.fits else _short(result, request)))
    return sorted(out, key=lambda c: (not c.fits, c.short))


def _halved(search: Search, closest: Evaluated) -> Any:
    """The closest plan with the largest half, quarter, ... of its micro-batch that fits, else with the smallest."""
    work = closest.candidate.workload
    micro, accumulate = work.micro_batch, work.accumulate
    while micro > 1:
        smaller = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        accumulate *= micro // smaller if search.request.global_batch else 1
        micro = smaller
        candidate = search.with_micro_batch(closest.candidate, micro, accumulate)
        if search.evaluate(candidate).fits:
            break
    return candidate


def _in_another_engine(candidate: Any) -> Any:
    """The same share per GPU and the same checkpointing under the other engine, with its own defaults."""
    plan = candidate.plan
    strategy = {"zero3": "fsdp", "zero2": "fsdp-grad", "fsdp": "zero3", "fsdp-grad": "zero2"}.get(plan.strategy)
    if strategy is None:
        return candidate
    return replace(candidate, plan=Plan(strategy=strategy, checkpointing=plan.checkpointing))  # type: ignore[arg-type]


def _more_gpus(base: Any) -> list[tuple[str, str, Any]]:
    """One more GPU in the node, or one more node where eight fill it."""
    cluster = base.cluster
    if cluster.world_size == 1 or cluster.gpu.is_cpu:
        return []
    if cluster.gpus_per_node >= 8 or cluster.nodes > 1:
        more = replace(cluster, nodes=cluster.nodes + 1)
        return [("one more node", f"--nodes {more.nodes}", replace(base, cluster=more))]
    more = replace(cluster, gpus_per_node=cluster.gpus_per_node + 1)
    return [("one more GPU", f"--gpus {more.gpus_per_node}", replace(base, cluster=more))]


def _larger_gpu(base: Any) -> list[tuple[str, str, Any]]:
    """The next larger GPU of the catalog."""
    from toolkit.specs.catalog import gpus

    if base.cluster.gpu.is_cpu:
        return []
    larger = sorted((g for g in gpus().values() if g.memory > base.cluster.gpu.memory * 1.1), key=lambda g: g.memory)
    if not larger:
        return []
    gpu = larger[0]
    return [(f"a larger GPU ({gpu.name})", f"--gpu {gpu.name}", replace(base, cluster=replace(base.cluster, gpu=gpu)))]


__all__ = ["Change", "Estimate", "Recommendation", "UserError", "recommend"]
