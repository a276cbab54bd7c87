"""ZeRO-1 and ZeRO-2 with `contiguous_gradients` off: gradients are reduced where they lie.

DeepSpeed 0.19.8, `deepspeed/runtime/zero/stage_1_and_2.py`: no buckets are allocated (`setup_buckets`), a full bucket is
flattened to be reduced (`allreduce_bucket`), and the gradients of this rank's partition stay the parameters' own until the step.
With `overlap_comm` those of other ranks go when the next bucket is reduced (`previous_reduced_grads`). Offload forces it on.
"""

from __future__ import annotations

from toolkit.strategies.zero.memory import Zero12Engine
from toolkit.timeline.tape import Tape
from toolkit.timeline.trace import Mark


class LooseZero12Engine(Zero12Engine):
    """Stages 1 and 2 whose gradients are not gathered in buffers."""

    averaged: dict[str, tuple[int, tuple[int, int], int]] | None = None
    """Gradients of this rank that earlier micro-batches left (`averaged_gradients`)."""
    late: tuple[str, ...] = ()
    """Reduced ones of other ranks that are still there."""

    def gradient(self, tape: Tape, mark: Mark) -> None:
        super(Zero12Engine, self).gradient(tape, mark)
        if mark.name in self.slices and (self.stage == 2 or self.overlap and self.last):
            self._into_bucket(tape, mark.name)

    def _into_bucket(self, tape: Tape, name: str) -> None:
        numel = self.slices[name].info.numel
        if self.elements + numel > self.bucket_size:
            self._reduce_bucket(tape)
        self.elements += numel
        self.bucket.append(name)

    def _reduce_bucket(self, tape: Tape) -> None:
        self._drop_late(tape)
        tape.transient(self.elements * self.weight_size, "communication", "flattened reduce bucket")
        if self.stage == 2:
            self.late = tuple(name for name in self.bucket if 0 not in self.slices[name].partitions)
            if not self.overlap:
                self._drop_late(tape)
        self.bucket.clear()
        self.elements = 0

    def _drop_late(self, tape: Tape) -> None:
        for name in self.late:
            if name in self.gradients:
                self.drop_gradient(tape, name)
        self.late = ()

    def backward_done(self, tape: Tape) -> None:
        if self.stage == 1 and not self.last:
            return
        self._reduce_the_rest(tape)
        self._drop_late(tape)
        mine = {} if self.averaged else {name: found for name, found in self.gradients.items() if self._is_mine(name)}
        for name in list(self.gradients):
            if name not in mine:
                self.drop_gradient(tape, name)
        if mine:
            self.averaged = mine
            self.gradients = {}

    def _is_mine(self, name: str) -> bool:
        return name in self.slices and 0 in self.slices[name].partitions

    def _free_partition(self, tape: Tape) -> None:
        self.gradients = {**self.gradients, **(self.averaged or {})}
        for name in self.averaged or ():
            self.drop_gradient(tape, name)
        self.averaged = None
