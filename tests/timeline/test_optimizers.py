"""What a step of torch's optimizers allocates on the way, and what they keep, against the optimizers themselves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.timeline.optimizers import Impl, OptimizerTensor, play_step, state_bytes
from toolkit.timeline.tape import LabelTable, Program, Tape

SHAPES = [(300, 500), (4000,), (700, 300), (90_000,), (64, 64), (20, 10, 400)]
SCALARS = 2048
"""Bytes of norms and the like, which no timeline holds."""


class Alive(TorchDispatchMode):
    """The highest sum of the storages that operators made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.made = {key: item for key, item in self.made.items() if not item[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self.made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.made.values()))
        return out


def _parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


CASES: list[tuple[str, Impl, Any]] = [
    ("adamw", "loop", lambda ps: torch.optim.AdamW(ps, foreach=False)),
    ("adamw", "foreach", lambda ps: torch.optim.AdamW(ps, foreach=True)),
    ("adamw", "fused", lambda ps: torch.optim.AdamW(ps, fused=True)),
    ("adafactor", "loop", lambda ps: torch.optim.Adafactor(ps)),
    ("sgd", "loop", lambda ps: torch.optim.SGD(ps, foreach=False)),
]


@pytest.mark.parametrize(("optimizer", "impl", "make"), CASES, ids=[f"{name}-{impl}" for name, impl, _ in CASES])
@pytest.mark.parametrize("order", [1, -1], ids=["", "reversed"])
def test_a_step_allocates_what_torchs_does(optimizer: str, impl: Impl, make: Any, order: int) -> None:
    parameters = _parameters()[::order]
    real = make(parameters)
    real.step()  # makes the states
    with Alive() as alive:
        real.step()
    tape = Tape(Program([], LabelTable(), None, False))  # type: ignore[arg-type]
    play_step(tape, [OptimizerTensor(p.numel(), 4, tuple(p.shape)) for p in parameters], optimizer, impl)
    predicted = max(itertools.accumulate(tape.deltas), default=0)
    assert abs(alive.peak - predicted) <= SCALARS
    assert sum(tape.deltas) == 0


@pytest.mark.parametrize(("optimizer", "impl", "make"), CASES, ids=[f"{name}-{impl}" for name, impl, _ in CASES])
def test_the_states_are_torchs(optimizer: str, impl: Impl, make: Any) -> None:
    parameters = _parameters()
    real = make(parameters)
    real.step()
    for parameter in parameters:
        kept = sum(value.nbytes for value in real.state[parameter].values() if isinstance(value, torch.Tensor))
        on_device, on_host = state_bytes(optimizer, OptimizerTensor(parameter.numel(), 4, tuple(parameter.shape)), "cpu", impl)
        assert sum(on_device) + on_host == kept
