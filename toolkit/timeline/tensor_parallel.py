"""Tensor parallelism as transformers does it, traced as one rank of ranks that do not exist.

The model's own plan (`base_model_tp_plan`) is applied by transformers itself (`transformers/distributed/tensor_parallel.py`):
its parameters become DTensors, its forward is wrapped. torch's fake process group stands for the other ranks: collectives
return at once with outputs of the right size, so that all that DTensor allocates on the way is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.timeline.build import BuiltModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads",
          "qkv_proj": "num_key_value_heads", "query_key_value": "num_attention_heads", "q_b_proj": "num_attention_heads",
          "kv_b_proj": "num_attention_heads"}
"""Projections and the count in the config of the heads that they hold; a rank holds whole heads."""


@contextmanager
def ranks(tp: int, cp: int = 1) -> Iterator[DeviceMesh | None]:
    """A mesh of `cp` x `tp` ranks; None for one rank. This process has the last part of the sequence, whose queries see all of
    it, and the first part of each layer.

    Raises:
        UserError: this process belongs to a distributed run, which has ranks of its own.
    """
    if tp * cp == 1:
        yield None
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UserError(f"tp {tp} and cp {cp} can't be estimated inside a distributed run; use toolkit estimate")
    hook = sys.excepthook  # torch wraps it to put the rank before every line of a traceback, and leaves it so
    dist.init_process_group("fake", store=FakeStore(), rank=(cp - 1) * tp, world_size=cp * tp)
    try:
        with _unseen(ShardingPropagator, "_propagate_tensor_meta_non_cached"):
            yield init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _unseen(owner: type, name: str) -> Iterator[None]:
    """Run a method outside of all dispatch modes: DTensor asks for the shapes of whole results on fake tensors of its own,
    which a recorder must not take for allocations."""
    from torch.utils._python_dispatch import _disable_current_modes

    method = getattr(owner, name)

    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    setattr(owner, name, outside)
    try:
        yield
    finally:
        setattr(owner, name, method)


def split(name: str, built: BuiltModel, mesh: DeviceMesh) -> None:
    """Give the model on the meta device this rank's shards, in place, by its own plan.

    Raises:
        UserError: the model has no plan, or the degree does not divide its heads.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model, degree = built.model, mesh.size()
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise UserError(f"tp {degree} and {type(model).__name__} exclude each other: transformers has no tensor-parallel plan "
                        f"for {name}; use fsdp or zero3")
    _check_heads(built.config, plan, degree)
    expanded = model._resolve_parallel_plans(DistributedConfig(tp_size=degree))[0]
    model._tp_size, model._device_mesh = degree, mesh  # where peft looks for them
    _untie(model)
    try:
        apply_tensor_parallelism(model, mesh, expanded)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{name} can't be split for tp {degree}: {' '.join(str(error).split())[:200]}") from None
    model.tie_weights()


def _untie(model: Any) -> None:
    """Each holder of a tied parameter its own one: weights are loaded so, and tied again when they are sharded."""
    import torch

    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in seen:
                module._parameters[name] = torch.nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            seen.add(id(parameter))


def _check_heads(config: Any, plan: dict[str, str], degree: int) -> None:
    for rule, style in plan.items():
        count_name = _HEADS.get(rule.rpartition(".")[2])
        count = getattr(config, count_name, None) if count_name else None
        if count is None and count_name:
            count_name = "num_attention_heads"
            count = getattr(config, count_name, None)
        if style == "colwise" and isinstance(count, int) and count % degree:
            raise UserError(f"tp {degree} does not divide {count_name} {count} of the model; use a divisor of {count}")
