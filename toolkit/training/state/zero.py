"""DeepSpeed's ZeRO: the state lies in flat fp32 partitions; here are the stretches that belong to each parameter.

The partitions are the masters of the weights. What the model computes with is cast from them, here as in every
optimizer step, so the masters alone are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from toolkit.errors import ToolkitError
from toolkit.training.state.live import Live, Scalar, make_states, persistent_buffers, trained
from toolkit.training.state.store import Fragment


def zero_state(engine: Any) -> Live:
    """The state of a DeepSpeed engine.

    Raises:
        ToolkitError: its optimizer state lies on NVMe.
    """
    if getattr(engine.optimizer, "swap_optimizer", False):
        raise ToolkitError("optimizer state that DeepSpeed keeps on NVMe cannot be saved or loaded")
    return Zero3State(engine) if hasattr(engine.optimizer, "fp32_partitioned_groups_flat") else Zero12State(engine)


class _ZeroState:
    def __init__(self, engine: Any) -> None:
        self.engine, self.zero = engine, engine.optimizer
        self.inner = self.zero.optimizer

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in trained(self.engine.module)}

    def _stretches(self) -> Iterator[tuple[str, Any, torch.Tensor, int, int, int]]:
        """(name, parameter, flat partition, position in it, position in the parameter, elements)."""
        raise NotImplementedError

    def fragments(self) -> Iterator[Fragment]:
        import torch.distributed as dist

        place = (dist.get_rank(), dist.get_world_size())
        for name, buffer in persistent_buffers(self.engine.module):
            if buffer.numel():
                yield Fragment("buffers", name, 0, tuple(buffer.shape), buffer.detach().view(-1), place)
        shapes = self.shapes()
        for name, _, flat, at, start, numel in self._stretches():
            yield Fragment("weights", name, start, shapes[name], flat.detach()[at : at + numel])
            for kind, value in self.inner.state.get(flat, {}).items():
                if _is_scalar(value):
                    continue
                if not torch.is_tensor(value) or value.shape != flat.shape:
                    raise ToolkitError(f"under ZeRO, {kind} of {type(self.inner).__name__} does not belong to single "
                                       "parameters; use optimizer=adamw to write checkpoints")
                yield Fragment(kind, name, start, shapes[name], value.detach()[at : at + numel])

    def scalars(self) -> Iterator[Scalar]:
        for name, _, flat, _, start, _ in self._stretches():
            state = self.inner.state.get(flat, {})
            for kind, value in state.items():
                if _is_scalar(value):
                    yield Scalar(kind, name, state, owner=start == 0)

    def mirrors(self) -> Iterator[Fragment]:
        yield from ()

    def _zero_padding(self) -> None:
        """What no parameter fills of the optimizer's state: checkpoints do not hold it."""
        ends: dict[torch.Tensor, int] = {}
        for _, _, flat, at, _, numel in sorted(self._stretches(), key=lambda stretch: stretch[3]):
            for value in self.inner.state.get(flat, {}).values():
                if torch.is_tensor(value) and value.shape == flat.shape:
                    value[ends.get(flat, 0) : at].zero_()
            ends[flat] = at + numel
        for flat, state in self.inner.state.items():
            for value in state.values():
                if torch.is_tensor(value) and value.shape == flat.shape:
                    value[ends.get(flat, 0) :].zero_()

    def settle(self, step: int, skipped: int) -> None:
        self._cast()
        self.engine.global_steps, self.engine.skipped_steps = step, skipped
        self.engine.global_samples = step * self.engine.train_batch_size()
        self.engine.micro_steps = step * self.engine.gradient_accumulation_steps()
        if hasattr(self.inner, "ds_opt_adam"):
            _replay_bias_correction(self.inner, step - skipped)

    def _cast(self) -> None:
        raise NotImplementedError


class Zero12State(_ZeroState):
    """Stages 1 and 2: one partition of each parameter group, cut without regard to parameters."""

    def _stretches(self) -> Iterator[tuple[str, Any, torch.Tensor, int, int, int]]:
        flats = getattr(self.zero, "single_partition_of_fp32_groups", None) or self.zero.fp32_groups_flat_partition
        for name, p in trained(self.engine.module):
            mapping = p._hp_mapping
            if mapping is not None:
                here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
                yield name, p, flats[mapping.param_group_index], here.start, there.start, here.numel

    def create(self, known: set[str]) -> None:
        make_states(self.inner, [p for group in self.inner.param_groups for p in group["params"]])
        self._zero_padding()

    def mirrors(self) -> Iterator[Fragment]:
        for name, p in trained(self.engine.module):
            if p.device.type == "cpu":  # Between processes of a CPU, sending takes ten times as long as the system's cache.
                yield Fragment("weights", name, 0, tuple(p.shape), p.detach().view(-1))

    def _cast(self) -> None:
        if any(p.device.type != "cpu" for _, p in trained(self.engine.module)):
            self.zero.update_lp_params()


class Zero3State(_ZeroState):
    """Stage 3: a partition of each parameter, padded to equal lengths, gathered into sub-groups."""

    def _stretches(self) -> Iterator[tuple[str, Any, torch.Tensor, int, int, int]]:
        import torch.distributed as dist

        for name, p in trained(self.engine.module):
            group, at, length = self.zero.grad_position[self.zero.get_param_id(p)]
            start = dist.get_rank(p.ds_process_group) * int(length)
            numel = min(int(length), p.ds_numel - start)
            if numel > 0:
                yield name, p, self.zero.fp32_partitioned_groups_flat[group], int(at), start, numel

    def create(self, known: set[str]) -> None:
        for number, flat in enumerate(self.zero.fp32_partitioned_groups_flat):
            group = self.inner.param_groups[self.zero.sub_group_to_group_id[number]]
            group["params"] = [flat]
            make_states(self.inner, [flat])
            group["params"] = []
        self._zero_padding()

    def _cast(self) -> None:
        zero = self.zero
        for flat, masters, parts in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat,
                                        zero.fp16_partitioned_groups, strict=True):
            flat.data.copy_(masters.data)
            for part, value in zip(parts, zero.unflatten(flat, parts), strict=True):
                part.data = value.data
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        zero.checkpoint_event_epilogue()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0)


def _replay_bias_correction(optimizer: Any, steps: int) -> None:
    """Bring DeepSpeed's CPU Adam where it was to the last bit.

    Its native part keeps the powers of the betas as a running product, which is not in its state; after a resume it
    would take them from `pow`, which rounds otherwise.
    """
    empty = [torch.empty(0) for _ in range(4)]
    group = optimizer.param_groups[0]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, group["lr"], *group["betas"], group["eps"],
                                          group["weight_decay"], group["bias_correction"], *empty)
