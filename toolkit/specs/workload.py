"""What is trained and how: the part of a run that does not depend on how it is spread over GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from toolkit.specs.check import check_choices, check_positive
from toolkit.specs.variant import Variant

Method = Literal["full", "lora", "qlora"]
Precision = Literal["fp32", "bf16", "fp16", "bf16-pure"]
WeightsDtype = Literal["auto", "fp32", "bf16"]
Optimizer = Literal["adamw", "adamw-8bit", "paged-adamw-8bit", "adafactor", "sgd", "lion"]
OptimizerImpl = Literal["default", "foreach", "fused", "loop"]
Attention = Literal["eager", "sdpa", "flash"]
Loss = Literal["standard", "chunked", "fused"]
Alloc = Literal["expandable", "default"]
Lengths = Literal["equal", "varied"]
Task = Literal["auto", "causal-lm", "seq2seq-lm", "sequence-classification", "token-classification"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One fine-tuning workload. All counts are per rank unless they say otherwise."""

    method: Method = "full"
    lora_rank: int = 16
    """Rank of the adapters; no effect when method is full."""
    lora_targets: str = "all-linear"
    """`all-linear`, or module names joined by commas (q_proj,v_proj)."""
    seq_len: int = 2048
    """Tokens per sample."""
    micro_batch: int = 1
    """Samples per rank and forward pass."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    precision: Precision = "bf16"
    """bf16 and fp16: mixed precision as Accelerate does it for the engine; bf16-pure: everything in bf16, no autocast."""
    weights_dtype: WeightsDtype = "auto"
    """What the model is loaded as; auto: fp32 for full, bf16 for the frozen base of lora (see `loaded_dtype`)."""
    optimizer: Optimizer = "adamw"
    optimizer_impl: OptimizerImpl = "default"
    """default: what torch chooses on the device (foreach on CUDA, loop on a CPU)."""
    attention: Attention = "sdpa"
    loss: Loss = "standard"
    compile: bool = False
    loss_only: bool = False
    """True: the forward returns the summed loss and nothing else, as the recipe's does; False: Hugging Face's outputs,
    logits included, which Accelerate's mixed precision copies to fp32."""
    packed: bool = False
    """True: a row may hold several samples, kept apart by positions that begin anew, as the recipe packs them; for sdpa
    transformers then makes a mask."""
    alloc: Alloc = "expandable"
    """CUDA's caching allocator: with expandable segments, as every launch file sets it, or with fixed ones, torch's default."""
    lengths: Lengths = "equal"
    """equal: every batch has rows of `seq_len` tokens (packed, or padded to it); varied: a batch is padded to its longest row,
    and `seq_len` is the longest of all. With fixed segments the shorter ones leave blocks that the longest does not fit in."""
    task: Task = "auto"
    """auto: read from the architecture that the model's config names."""
    clip: float | None = None
    """Maximum gradient norm that the training loop asks for; None: it does not clip (DeepSpeed under Accelerate still
    clips at 1.0 unless its config says otherwise)."""
    variant: Variant = field(default_factory=Variant)
    """What another program than the recipe does differently."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "lora_rank", "seq_len", "micro_batch", "accumulate", limit=10**9)

    @property
    def loaded_dtype(self) -> Literal["fp32", "bf16"]:
        """The dtype the model's weights are loaded as."""
        if self.weights_dtype != "auto":
            return self.weights_dtype
        return "bf16" if self.method != "full" or self.precision == "bf16-pure" else "fp32"

    def with_(self, **changes: object) -> Workload:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
