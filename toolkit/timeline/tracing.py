"""Run a model's own code once on fake tensors and return its trace."""

from __future__ import annotations

import inspect
import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.errors import UserError
from toolkit.specs import ModelSpec, Workload
from toolkit.timeline.build import BuiltModel, build, materialise
from toolkit.timeline.expand import expand
from toolkit.timeline.shards import local
from toolkit.timeline.trace import ModelTrace


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How an engine and a device compute: everything besides the workload that changes what the model's code allocates."""

    device: Literal["cpu", "cuda"] = "cpu"
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """torch.autocast around the forward, and Accelerate's conversion of the outputs to fp32."""
    compute_dtype: Literal["loaded", "fp32", "bf16", "fp16"] = "loaded"
    """What the engine casts floating parameters to before they are used."""
    keeps_inputs: bool = False
    """DeepSpeed's linear function under ZeRO-3, which saves the input of frozen layers too."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    tp: int = 1
    """Ranks that share each layer's products; the trace is the first one's."""

    cp: int = 1
    """Ranks that share the sequence by ring attention; the trace is the last one's."""
    sp: int = 1
    """Ranks that share the sequence, and in attention the heads (Ulysses)."""

    def whole(self) -> Numerics:
        """The same without ranks that share the work: what the job computes in all."""
        return replace(self, tp=1, cp=1, sp=1)


def trace_model(spec: ModelSpec, workload: Workload, numerics: Numerics) -> ModelTrace:
    """Trace forward, loss and backward of one micro-batch.

    Raises:
        UserError: the model can't be built, or an operator of it can't run on fake tensors (it is named).
    """
    attention = "eager" if workload.attention == "eager" else "sdpa"  # sdpa becomes the kernel that the device would run
    family = str(spec.config.get("model_type"))
    if family not in _NOT_CUT:
        built = build(spec, workload, attention)
        try:
            return _trace(spec, built, workload, numerics)
        except _CodeFails:
            if not built.is_cut:
                raise
    trace = _trace(spec, build(spec, workload, attention, whole=True), workload, numerics)
    _NOT_CUT.add(family)
    return trace


_NOT_CUT: set[str] = set()
"""Families whose code knows its layers by number (Zamba2's, Gemma 3n's) and runs only with all of them, as far as met."""


class _CodeFails(UserError):
    """The model's own code does not run on fake tensors."""


def _trace(spec: ModelSpec, built: BuiltModel, workload: Workload, numerics: Numerics) -> ModelTrace:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from toolkit.timeline import adapters, semantics, sequence_parallel, tensor_parallel

    sequence_parallel.check(spec.name, built.config, numerics.cp, numerics.sp)
    with ExitStack() as stack:
        mesh = stack.enter_context(tensor_parallel.ranks(numerics.tp, numerics.cp))
        if numerics.tp > 1 and mesh is not None:
            tensor_parallel.split(spec.name, built, mesh["tp"])
        adapters.freeze_and_adapt(built.model, workload)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        materialise(built.model)
        itemsizes = {name: p.element_size() for name, p in built.model.named_parameters()}
        _cast(built.model, numerics)
        semantics.prepare(built.model, workload, numerics)
        log = logging.getLogger("torch._subclasses.fake_tensor")  # which would print a traceback of what is one line here
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        try:
            recorder = _record(built, workload, numerics, mesh)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            if isinstance(error, (torch.cuda.OutOfMemoryError, UserError)):
                raise
            raise _CodeFails(_no_trace(spec.name, workload, error)) from error
    return expand(built, recorder, workload, itemsizes)


def _no_trace(name: str, workload: Workload, error: Exception) -> str:
    """The line about model code that fails: with the error, the module's line where it arose, and what else may do."""
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/models/" in frame.filename]
    where = f" (in {frames[-1].name}, {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:240]
    if type(error).__name__ == "DataDependentOutputException":
        return f"{name} can't be traced without data: what its code does depends on values{where}"
    others = [] if workload.attention == "eager" else ["--attention eager"]
    others += ["it without --compile"] if workload.compile else []
    others += ["other --lora-targets"] if workload.method != "full" else []
    hint = f"; try {' or '.join(others)}" if others else ""
    return f"{name} does not trace on fake tensors: {type(error).__name__}: {text}{where}{hint}"


def _cast(model: Any, numerics: Numerics) -> None:
    """Give parameters the dtype in which the engine computes."""
    import torch

    if numerics.compute_dtype == "loaded":
        return
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[numerics.compute_dtype]
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                new = getattr(parameter, "_cast_to", None)
                if new is None:
                    new = torch.nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=parameter.requires_grad)
                    parameter._cast_to = new
                module._parameters[name] = new


def _batch(built: BuiltModel, workload: Workload, length: int) -> dict[str, Any]:
    """Inputs of one micro-batch: ids of shape (micro_batch, length), int64; the labels are the ids."""
    import torch

    ids = torch.zeros((workload.micro_batch, length), dtype=torch.long)
    if built.kind == "sequence-classification":
        return {"input_ids": ids, "labels": torch.zeros((workload.micro_batch,), dtype=torch.long)}
    batch = {"input_ids": ids, "labels": ids}
    if built.kind != "token-classification" and built.kind != "seq2seq-lm":
        batch["use_cache"] = False
    if (workload.packed or length < workload.seq_len) and "position_ids" in inspect.signature(built.model.forward).parameters:
        batch["position_ids"] = torch.zeros_like(ids)
    return batch


def _record(built: BuiltModel, workload: Workload, numerics: Numerics, mesh: Any) -> Any:
    import torch

    from toolkit.timeline import semantics
    from toolkit.timeline.recorder import Recorder

    model = built.model
    model.train()
    batch = _batch(built, workload, workload.seq_len // (numerics.cp * numerics.sp))
    known: dict[int, int] = {}
    held = [*model.parameters(), *model.buffers(), *(v for v in batch.values() if isinstance(v, torch.Tensor))]
    for tensor in held:
        storage = local(tensor).untyped_storage()
        known[storage._cdata] = storage.nbytes()
    layers = {f"{stack.path}.{i}" for stack in built.stacks for i in range(len(stack.kept))}
    recorder = Recorder(model, layers, known, numerics.device == "cpu")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    recorder.head_path = next((p for p, m in model.named_modules() if m is head), "\0") if head is not None else "\0"
    names = {id(p): name for name, p in model.named_parameters()}
    recorder.attach(model, names)
    try:
        with semantics.functions(workload, numerics, mesh), recorder:
            named: list[Any] = []
            loss = semantics.forward(model, batch, workload, numerics, named)
            if workload.variant.graph_stays:
                recorder.mark("loss-done", "")
            recorder.phase = "backward"
            loss.backward()
            recorder.close_backward()
            recorder.leave_layers()
            if workload.variant.graph_stays:
                recorder.mark("graph-dies", "")
            del loss
            named.clear()
            recorder.mark("backward-done", "")
    finally:
        recorder.detach()
    return recorder
