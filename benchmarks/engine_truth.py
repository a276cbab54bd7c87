"""Measure what a real engine takes on a CPU: run a few steps in N gloo processes and count every byte of their tensors.

    python benchmarks/engine_truth.py '{"strategy": "zero2", "model": "llama", "world": 2, "seq_len": 256, "micro_batch": 2}'

prints one JSON line with `resident` (held before each step), `peaks` (of each step), rank 0's. The loop is what a plain
Accelerate script does: labels are the inputs, the outputs are dropped before backward, gradients are set to None.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 4
DEFAULTS: dict[str, Any] = {
    "world": 2, "micro_batch": 2, "seq_len": 256, "accumulate": 1, "precision": "fp32", "checkpointing": "none",
    "attention": "eager", "optimizer": "adamw", "lora_rank": 0, "bucket": None, "persist": None, "tp": 1,
    "sp": 1, "shard_size": None,
}  # fmt: skip


def measure(row: dict[str, Any], timeout: int = 300) -> dict[str, Any]:
    """Run `row` for real; `resident` and `peaks` in bytes, one entry per step. Raises RuntimeError when a rank fails."""
    from toolkit.profiling.counter import build_shim

    shim = build_shim()
    if shim is None:
        raise RuntimeError("a C compiler is needed to count allocations")
    row = {**DEFAULTS, **row}
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ranks = []
        world = 1 if row["strategy"] == "single" else row["world"]
        for rank in range(world):
            environment = {**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                           "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
            if row["strategy"] != "single":
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world),
                                "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            out = Path(folder) / f"{rank}.json"
            words = [sys.executable, __file__, "--rank", json.dumps(row), str(out)]
            ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        try:
            errors = [process.communicate(timeout=timeout)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_127.0.0.1_{port}_*"):
                left.unlink(missing_ok=True)  # DeepSpeed's shared memory on a CPU, 66 MiB a rank, outlives it
        if any(process.returncode for process in ranks):
            raise RuntimeError(f"{row['strategy']} failed: " + "\n".join(e[-2000:] for e in errors if e))
        return json.loads((Path(folder) / "0.json").read_text())  # type: ignore[no-any-return]


def _accelerator(row: dict[str, Any]) -> Any:
    """An Accelerator that runs the engine on a CPU: the process group first, then the state that the engine asks for."""
    from accelerate import Accelerator
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig

    strategy = row["strategy"]
    options: dict[str, Any] = {}
    PartialState(cpu=True)
    if row["tp"] > 1:
        # A mesh of GPU-like ranks is what Accelerate's parallelism asks for; the model itself lies on the CPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        options["parallelism_config"] = ParallelismConfig(tp_size=row["tp"])
    if strategy == "hsdp":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=row["world"] // row["shard_size"],
                                                          dp_shard_size=row["shard_size"])
    if strategy in ("fsdp", "fsdp-grad", "hsdp"):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=strategy != "fsdp-grad",
            cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT",
        )
    if strategy.startswith("zero"):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        zero: dict[str, Any] = {"stage": int(strategy[4])}
        if row["bucket"]:
            zero |= {"reduce_bucket_size": row["bucket"], "allgather_bucket_size": row["bucket"]}
            if zero["stage"] == 3:
                zero |= {"stage3_prefetch_bucket_size": row["bucket"], "stage3_param_persistence_threshold": row["persist"]}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": row["micro_batch"],
                  "gradient_accumulation_steps": row["accumulate"], "zero_allow_untested_optimizer": True}
        if row["precision"] == "bf16":
            config["bf16"] = {"enabled": True}
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
        if row["sp"] > 1:
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo")
            handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=row["attention"])
            options["parallelism_config"] = ParallelismConfig(sp_size=row["sp"], sp_backend="deepspeed", sp_handler=handler)
    mixed = "no" if row["precision"] == "fp32" else row["precision"]
    accelerator = Accelerator(mixed_precision=mixed, gradient_accumulation_steps=row["accumulate"], **options)
    engine = "DEEPSPEED" if strategy.startswith("zero") else "FSDP"
    wanted = {"single": "NO", "ddp": "MULTI_GPU" if row["tp"] > 1 else "MULTI_CPU"}.get(strategy, engine)
    if accelerator.distributed_type.value != wanted:
        raise RuntimeError(f"asked for {strategy}, got {accelerator.distributed_type.value}")
    return accelerator


def _tensor_parallel(model: Any, row: dict[str, Any]) -> Any:
    """The model loaded again, each rank its shards, as transformers' tensor parallelism wants it."""
    import torch
    from safetensors.torch import save_model
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_model(model, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})
        model = type(model).from_pretrained(folder, attn_implementation=row["attention"],
                                            distributed_config=DistributedConfig(tp_size=row["tp"]))
        copies = {parameter: torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()}
        for module in model.modules():  # off the mapped file, into memory that is counted
            module._parameters.update({name: copies[p] for name, p in module._parameters.items() if p is not None})
    return model


def _rank(row: dict[str, Any], out: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.profiling.counter import device_counter

    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = json.loads((HERE / "data" / "models" / f"{row['model']}.json").read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    counter = device_counter("cpu")
    gc.collect()
    start = counter.live()
    accelerator = _accelerator(row)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=row["attention"])
    if row["tp"] > 1:
        model = _tensor_parallel(model, row)
    if row["lora_rank"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=row["lora_rank"], target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    if row["checkpointing"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kind = torch.optim.AdamW if row["optimizer"] == "adamw" else torch.optim.SGD
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    vocab = min(1000, config.get_text_config().vocab_size)
    length = row["seq_len"] // row["sp"]
    batch = {"input_ids": torch.randint(0, vocab, (row["micro_batch"], length))}
    batch["labels"] = batch["input_ids"]
    if row["sp"] > 1:
        batch["position_ids"] = (torch.arange(length) + length * accelerator.process_index).repeat(row["micro_batch"], 1)
    resident, peaks = [], []
    for _ in range(STEPS):
        gc.collect()
        resident.append(counter.live() - start)
        counter.reset()
        for _ in range(row["accumulate"]):
            with accelerator.accumulate(model):
                outputs = model(**batch, use_cache=False)
                loss = outputs.loss
                del outputs
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        del loss
        peaks.append(counter.peak() - start)
    out.write_text(json.dumps({"resident": resident, "peaks": peaks}))
    accelerator.wait_for_everyone()
    os._exit(0)  # What was measured is on the disk; gloo's destructors abort now and then when a peer is gone first.


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        _rank(json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        print(json.dumps(measure(json.loads(sys.argv[1]))))
