"""What a training process holds from step to step, and on which object it hangs."""

from __future__ import annotations

from typing import Any

_BUFFERS = {
    "averaged_gradients": "gradients", "all_grad_tensors": "gradients", "grads_in_partition": "gradients",
    "grad_partitions_flat_buffer": "gradients", "ipg_buckets": "communication",
    "temp_grad_buffer_for_gpu_offload": "communication", "temp_grad_buffer_for_cpu_offload": "communication",
    "param_buffer_of_bit16_for_cpu_offload_groups": "communication", "fp32_partitioned_groups_flat": "master_weights",
    "single_partition_of_fp32_groups": "master_weights",
}  # fmt: skip
"""Attributes of DeepSpeed's optimizers (runtime/zero/stage_1_and_2.py, stage3.py)."""


def storage_of(tensor: Any) -> tuple[int, int]:
    """(address, bytes) of a tensor's memory on this rank; (0, 0) when it has none."""
    try:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError, ReferenceError):
        return 0, 0  # fake and meta tensors have no memory


def is_own_memory(gradient: Any) -> bool:
    """False for a gradient that an engine has moved into a bucket; the shards of FSDP2 are views of what they were reduced in."""
    return hasattr(gradient, "_local_tensor") or storage_of(gradient)[1] <= gradient.nbytes


def engine_buffers(model: Any, optimizer: Any) -> dict[str, list[Any]]:
    """The tensors by category that hang on the prepared model, on the innermost optimizer, and on what is wrapped around it."""
    found: dict[str, list[Any]] = {"parameters": [], "master_weights": [], "optimizer_states": [], "gradients": [],
                                   "communication": []}
    weights = [*model.parameters(), *model.buffers()]
    found["parameters"] = weights + [p.ds_tensor for p in weights if getattr(p, "ds_tensor", None) is not None]
    found["gradients"] = [p.grad for p in weights if p.grad is not None and is_own_memory(p.grad)]
    inner = optimizer
    while getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
        for name, category in _BUFFERS.items():
            found[category] += _flat(getattr(inner, name, None))
    found["master_weights"] += [p for group in inner.param_groups for p in group["params"]]
    found["optimizer_states"] += [v for state in inner.state.values() if isinstance(state, dict) for v in state.values()
                                  if hasattr(v, "untyped_storage")]
    return found


def _flat(value: Any, depth: int = 4) -> list[Any]:
    """The tensors of nested lists, dictionaries and records."""
    if hasattr(value, "untyped_storage"):
        return [value]
    if depth == 0 or value is None or isinstance(value, (str, int, float)):
        return []
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple, set)):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for item in value for tensor in _flat(item, depth - 1)]


def resident_by_category(model: Any, optimizer: Any, resident: int) -> dict[str, int]:
    """Bytes of this rank's tensors between steps: what hangs on the model and on the innermost optimizer, and the rest
    (buffers of C++, what the libraries keep). Sums to `resident` unless tensors lie elsewhere."""
    counted: set[int] = set()
    sizes: dict[str, int] = {}
    for category, tensors in engine_buffers(model, optimizer).items():
        sizes[category] = 0
        for tensor in tensors:
            address, size = storage_of(tensor)
            if address and address not in counted:
                counted.add(address)
                sizes[category] += size
    return {**sizes, "other": max(0, resident - sum(sizes.values()))}
