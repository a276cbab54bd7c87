"""How other training programs do what the recipe does its own way. Only estimates know these; nothing launches them.

The defaults are what the recipe and today's Hugging Face stack do, so a workload without a variant is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.specs.check import check_choices

Quantization = Literal["nf4-dq", "nf4", "gptq", "gptq-torch", "int8"]
AdapterDtype = Literal["fp32", "weights"]
LossCode = Literal["current", "shifted", "upcast", "chunks", "pieces", "native"]
Kernels = Literal["model", "fused-norm", "liger"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Details of a run that change its memory."""

    quantization: Quantization = "nf4-dq"
    """Of the frozen base under qlora: NF4 (or FP4) with or without the second quantization, GPTQ by its triton kernels or
    unpacked by torch's operators, LLM.int8."""
    gptq_group: int = 128
    """Weights of one output that share a scale under GPTQ; 0: all of them ("group size None")."""
    adapter_dtype: AdapterDtype = "fp32"
    """peft casts trainable adapters to fp32 (autocast_adapter_dtype); other libraries leave them in the weights' dtype."""
    adapter_dropout: float = 0.0
    saves_packed_inputs: bool = False
    """True: a packed linear layer keeps its input for the backward although nothing uses it (bitsandbytes before 0.43,
    `MatMul4Bit`: `ctx.tensors = (A, B)`; later ones keep `(None, B)`)."""
    packs_head: bool = False
    """True: the output layer is packed as well (Lightning's BitsandbytesPrecision, which replaces every linear layer)."""
    unpacks_twice: bool = False
    """True: weights were packed from fp16, so each is unpacked to fp16 and then cast (the same plugin)."""
    fused_qkv: str = ""
    """One product for query, key and value, and which of them ("q,v") have adapters there (litgpt); "none": no adapters;
    empty: the model's own code."""
    upcast_rest: bool = False
    """True: what is not quantized is cast to fp32 (peft's prepare_model_for_kbit_training)."""
    trainable_modules: str = ""
    """Modules trained in full beside the adapters (peft's modules_to_save), joined by commas."""
    loss_code: LossCode = "current"
    """current: logits to fp32, padded labels (transformers from 4.49 on); shifted: 16-bit logits, fp32 ones and a contiguous
    copy of all but the last position (4.46 to 4.48); upcast: the same without the 16-bit ones (to 4.45); chunks: cross entropy
    over 8 chunks of whole logits; pieces: the same of logits that the output layer gives in 8 pieces (torchtune); native:
    logits in pieces of 128 positions and their cross entropy in the logits' dtype (litgpt)."""
    triton_loss: bool = False
    """True: one kernel for the cross entropy, which keeps the logits and writes the gradient over them (unsloth's)."""
    compiled_loss: bool = False
    """True: torch.compile makes one kernel of the cross entropy, which keeps the logits and makes a gradient beside them."""
    upcast_logits: bool = True
    """False: the model's own code does not make its logits fp32 (GPT-BigCode, GPT-2 and BLOOM before transformers 4.49)."""
    kernels: Kernels = "model"
    """fused-norm: norms as one kernel that saves its 16-bit input (unsloth's, llm-foundry's
    low_precision_layernorm); liger: that, and SwiGLU that saves gate and up."""
    reentrant: bool = False
    """True: torch's reentrant checkpointing (the default of Hugging Face's Trainer to transformers 4.5x)."""
    fp32_output: bool = False
    """True: logits are cast to fp32 when they leave the model (Lightning Fabric's `convert_output`)."""
    graph_stays: bool = False
    """True: the loop names the loss until the next forward gives another, and with it what a custom function of its graph holds
    outside `save_for_backward` (bitsandbytes' `ctx.tensors`): the inputs of packed layers are there through the next one."""
    keep_logits: bool = False
    """True: the training loop still names the logits while backward runs."""
    optimizer_in_backward: bool = False
    """True: each parameter is updated and its gradient dropped as soon as the gradient is there."""
    foreach_denominators: bool = False
    """True: foreach AdamW keeps the roots of the second moments beside its denominators (torch 2.0's `_multi_tensor_adamw`)."""
    every_second_matmul: bool = False
    """True: selective checkpointing saves every second matrix product only, as torchtitan's per-operator policy does."""
    rotary_tables: int = 0
    """Positions of which every layer keeps cosines and sines, as Qwen2's and Mixtral's do in transformers before 4.45
    (`Qwen2RotaryEmbedding._set_cos_sin_cache`: max_position_embeddings of them, in the weights' dtype)."""
    repeats_keys: bool = False
    """True: keys and values are copied for every query head before the attention kernel: transformers' sdpa before its #39412
    (2025-07) and its flash attention before 4.48 (Llama's excepted), torchtitan before its #2259 (2026-01), torchtune, litgpt."""
    keeps_projections: bool = False
    """True: each layer's projected queries, keys and values stay until the loss is there, although the layer is checkpointed:
    the cache that GPT-BigCode made while it trained was a view of them (transformers before 4.49)."""
    expert_loop: bool = False
    """True: a mixture's experts are separate linear layers, run one after the other (transformers before 5)."""
    cuda_modules: Literal["lazy", "eager"] = "lazy"
    """eager: CUDA loads all kernels into the context, its default before 12.2 (CUDA_MODULE_LOADING)."""
    shard_packed: bool = False
    """True: packed 4-bit weights are sharded with the rest (FSDP1 with a floating quant_storage, torchao's NF4)."""
    reduce_fp32: bool = False
    """True: FSDP2 reduces gradients in fp32 under mixed precision (torchtitan); Accelerate reduces them in the low precision."""
    mixed_flat: bool = False
    """True: frozen and trained parameters share FSDP1's flat parameter (use_orig_params without a wrap policy of their own),
    whose gradient is as large as all of it."""
    frozen_stays: bool = False
    """True: FSDP1 reshards units with frozen parameters only when the whole backward is done (torch before 2.1,
    pytorch/pytorch#95805 and #101982)."""

    def __post_init__(self) -> None:
        check_choices(self)
