"""What a workload excludes whatever spreads it: kernels that a device or a dtype has not, optimizers in one form only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.errors import UserError
from toolkit.specs import Cluster, Plan, Workload

WITHOUT_BF16 = ("volta", "turing")
"""Architectures without bf16 units and without the flash attention kernels, which need compute capability 8.0."""
TORCH_FUSED = ("adamw", "sgd")
"""Optimizers for which torch has other implementations than a loop over tensors (torch/optim/{adamw,sgd}.py)."""


@dataclass(frozen=True)
class Exclusion:
    """Two things that do not go together."""

    holds: Callable[[Workload, Plan, Cluster], bool]
    first: Callable[[Workload, Plan, Cluster], str]
    second: Callable[[Workload, Plan, Cluster], str]
    why: str
    """Why, and what would be right."""


def _option(name: str) -> Callable[[Workload, Plan, Cluster], str]:
    return lambda work, plan, cluster: f"{name.replace('_', '-')} {getattr(work, name)}"


def _gpu(work: Workload, plan: Plan, cluster: Cluster) -> str:
    return f"gpu {cluster.gpu.name}"


def _strategy(work: Workload, plan: Plan, cluster: Cluster) -> str:
    return plan.strategy


def _allgather_bucket(plan: Plan) -> int:
    """Elements; 0: DeepSpeed's default."""
    return plan.zero.allgather_bucket or plan.bucket or 0


EXCLUSIONS = (
    Exclusion(lambda w, p, c: w.method == "qlora" and c.gpu.is_cpu, _option("method"), _gpu,
              "the 4-bit kernels need a GPU; use lora"),
    Exclusion(lambda w, p, c: w.method == "qlora" and p.strategy == "zero3", _option("method"), _strategy,
              "transformers loads 4-bit weights whole onto each GPU (device_map), which it refuses under ZeRO-3; use fsdp or "
              "zero2, or method lora"),
    Exclusion(lambda w, p, c: "8bit" in w.optimizer and c.gpu.is_cpu, _option("optimizer"), _gpu,
              "bitsandbytes' optimizers need a GPU; use adamw"),
    Exclusion(lambda w, p, c: w.attention == "flash" and c.gpu.is_cpu, _option("attention"), _gpu,
              "flash-attn has no CPU kernel; use sdpa"),
    Exclusion(lambda w, p, c: w.attention == "flash" and c.gpu.architecture in WITHOUT_BF16, _option("attention"), _gpu,
              "flash attention needs compute capability 8.0 (Ampere or later); use sdpa"),
    Exclusion(lambda w, p, c: w.attention == "flash" and w.precision == "fp32" and w.loaded_dtype == "fp32", _option("attention"),
              _option("precision"), "flash kernels take 16-bit inputs only; use sdpa, or precision bf16"),
    Exclusion(lambda w, p, c: w.optimizer_impl in ("foreach", "fused") and w.optimizer not in TORCH_FUSED,
              _option("optimizer_impl"), _option("optimizer"), "torch has it for adamw and sgd; use optimizer-impl default"),
    Exclusion(lambda w, p, c: w.optimizer_impl != "default" and p.offload != "none" and p.strategy.startswith("zero"),
              _option("optimizer_impl"), lambda w, p, c: f"offload {p.offload} of {p.strategy}",
              "DeepSpeed's CPU Adam steps on the host; use optimizer-impl default"),
    Exclusion(lambda w, p, c: p.strategy in ("zero1", "zero2") and _allgather_bucket(p) % 2 == 1,
              lambda w, p, c: f"an allgather bucket of {_allgather_bucket(p):,} elements", _strategy,
              "DeepSpeed's stages 1 and 2 take even sizes only (nccl_start_alignment_factor); use one element more"),
)


def check(plan: Plan, workload: Workload, cluster: Cluster) -> None:
    """Refuse what no engine can run.

    Raises:
        UserError: names the two things that exclude each other and what would be right.
    """
    for rule in EXCLUSIONS:
        if rule.holds(workload, plan, cluster):
            names = [name(workload, plan, cluster) for name in (rule.first, rule.second)]
            raise UserError(f"{names[0]} and {names[1]} exclude each other: {rule.why}")


def warnings(workload: Workload, cluster: Cluster) -> list[str]:
    """What runs, but not as one would think, a sentence each."""
    bf16 = workload.precision in ("bf16", "bf16-pure")
    if bf16 and cluster.gpu.architecture in WITHOUT_BF16:
        return [f"{cluster.gpu.name} ({cluster.gpu.architecture}) has no bf16 units: torch computes it, slowly, by way of fp32; "
                "precision fp16 is what it is made for"]
    return []
