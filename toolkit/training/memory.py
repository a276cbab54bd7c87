"""What the run takes, step by step, and what was predicted for it."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

from toolkit.profiling.counter import Counter, device_counter
from toolkit.specs import Cluster, Gpu, ModelSpec, Plan
from toolkit.training.accelerator import without_sharded_init
from toolkit.training.config import TrainConfig
from toolkit.training.metrics import Log
from toolkit.training.step import highest
from toolkit.units import format_size

if TYPE_CHECKING:
    from accelerate import Accelerator

_STEADY_FROM = 3
"""Steps before this one still allocate what stays (optimizer state, prefetch plans)."""


class MemoryWatch:
    """Peaks of this rank's tensors, counted from the moment it was made: make it before the model is
    built."""

    def __init__(self, device_type: str) -> None:
        gc.collect()
        self.counter: Counter = device_counter(device_type)
        self.start = self.counter.live()
        self.peaks: list[int] = []
        self.resident = 0
        self.load_peak = 0

    def begin_step(self) -> None:
        """Call at the start of every optimizer step."""
        if not self.peaks:
            self.load_peak = self.counter.peak() - self.start
        self.resident = self.counter.live() - self.start
        self.counter.reset()

    def end_step(self) -> int:
        """The peak of the step in bytes."""
        self.peaks.append(self.counter.peak() - self.start)
        return self.peaks[-1]

    def measured(self, accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Any]:
        """What was measured, over all ranks; `resident_by_category` is of the rank that asks. Every rank must call it."""
        steady = self.peaks[_STEADY_FROM - 1 :] or self.peaks[-1:] or [0]
        by_rank = highest(accelerator, max(steady))
        return {
            "counter": self.counter.kind,
            "peak": max(by_rank),
            "peak_by_rank": by_rank,
            "first_step_peak": max(highest(accelerator, self.peaks[0] if self.peaks else 0)),
            "load_peak": max(highest(accelerator, self.load_peak)),
            "resident": max(highest(accelerator, self.resident)),
            "resident_by_category": resident_by_category(model, optimizer, self.resident),
            "steps": len(self.peaks),
        }


def resident_by_category(model: Any, optimizer: Any, resident: int) -> dict[str, int]:
    """Bytes of this rank's tensors between steps: what hangs on the model and on the innermost optimizer, and the rest
    (gradient buffers, communication, what the libraries keep). Sums to `resident` unless tensors lie elsewhere."""
    counted: set[int] = set()

    def held(tensors: list[Any]) -> int:
        total = 0
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    inner: Any = optimizer
    masters: list[Any] = []
    while hasattr(inner, "optimizer") and inner.optimizer is not None:
        inner = inner.optimizer
        masters += getattr(inner, "fp32_partitioned_groups_flat", [])  # ZeRO-3 lends them to its optimizer for a step.
    weights = [*model.parameters(), *model.buffers()]
    shards = [p.ds_tensor for p in weights if getattr(p, "ds_tensor", None) is not None]
    states = [value for state in inner.state.values() for value in state.values() if hasattr(value, "untyped_storage")]
    found = {
        "parameters": held(weights + shards),
        "master_weights": held([*masters, *(p for group in inner.param_groups for p in group["params"])]),
        "optimizer_states": held(states),
        "gradients": held([p.grad for p in weights if p.grad is not None]),
    }
    return {**found, "other": max(0, resident - sum(found.values()))}


def predict(config: TrainConfig, plan: Plan, model_config: Any, accelerator: Accelerator,
            log: Log) -> dict[str, Any] | None:
    """The estimate of this run on this machine as plain data, on the main process; None where there is none.

    A run is not held up by it: whatever goes wrong in an estimate is said in the log.
    """
    if not accelerator.is_main_process:
        return None
    spec = ModelSpec(name=config.model, config=model_config.to_dict(), source=config.model)
    try:
        from toolkit.estimate.engine import estimate

        with without_sharded_init(accelerator):
            found = estimate(spec, config.workload, plan, _cluster(accelerator))
    except Exception as error:  # noqa: BLE001 - see above
        log.say(f"note: this run's memory is not predicted ({type(error).__name__}: {' '.join(str(error).split())})")
        return None
    return dict(found.to_json()["memory"])


def _cluster(accelerator: Accelerator) -> Cluster:
    """The machines of this run as the estimate sees them."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpu = _cpu()
    if accelerator.device.type == "cuda":
        from toolkit.specs.detect import detect_gpus

        gpu = detect_gpus()[0]
    return Cluster(gpu=gpu, gpus_per_node=local, nodes=accelerator.num_processes // local)


def _cpu() -> Gpu:
    return Gpu(name="cpu", memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), bf16_flops=None,
               fp16_flops=None, fp32_flops=1e11, bandwidth=1e10, link="memory", link_bandwidth=1e10,
               pcie_bandwidth=1e10)


def compared(predicted: dict[str, Any] | None, measured: dict[str, Any]) -> str:
    """One line: predicted against measured peak."""
    peak = measured["peak"]
    if predicted is None:
        return f"memory: measured peak {format_size(peak)} ({measured['counter']}); no prediction for this run"
    claim = predicted["peak_allocated"]
    off = (claim - peak) / peak * 100 if peak else 0.0
    return (f"memory: predicted peak {format_size(claim)}, measured {format_size(peak)} "
            f"({measured['counter']}), {off:+.2f}%")
