"""One real step of many families on a CPU, every byte counted, against the estimate of `single`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from toolkit.estimate.engine import Estimator
from toolkit.profiling.counter import build_shim
from toolkit.specs import ModelSpec, Plan, Workload
from toolkit.specs.detect import make_cluster
from toolkit.timeline.tracing import Numerics, trace_model

SCRIPT = Path(__file__).parent / "family_steps.py"
SIZES = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 256, "vocab_size": 64,
         "max_position_embeddings": 512}
GROUPED = {**SIZES, "num_key_value_heads": 4, "head_dim": 16}
MOE = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
PAIR = {"d_model": 128, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
        "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 64, "max_position_embeddings": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SIZES},
    "llama": {"model_type": "llama", **GROUPED},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 32, **GROUPED},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, **GROUPED},
    "deberta-v2": {"model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"], **SIZES},
    "modernbert": {"model_type": "modernbert", "architectures": ["ModernBertForSequenceClassification"], "pad_token_id": 0,
                   "cls_token_id": 1, "local_attention": 32, **SIZES},
    "bart": {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], **PAIR},
    "jamba": {"model_type": "jamba", "use_mamba_kernels": False, **MOE},
}
ONCE = 64 << 10
"""Bytes that kernels of the CPU's libraries keep after their first call, whatever the model."""


def test_a_real_step_takes_what_was_predicted(tmp_path: Path) -> None:
    rows = [{"config": config, "batch": 2, "length": 96, "checkpointing": checkpointing}
            for name, config in FAMILIES.items() for checkpointing in (False, True) if name != "jamba" or not checkpointing]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    shim = build_shim()
    assert shim is not None
    done = subprocess.run([sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    for row, peak in zip(rows, measured, strict=True):
        work = Workload(seq_len=row["length"], micro_batch=row["batch"], precision="fp32", weights_dtype="fp32")
        plan = Plan(checkpointing="full" if row["checkpointing"] else "none")
        spec = ModelSpec(name="model", config=row["config"])
        found = Estimator(spec).estimate(work, plan, make_cluster(gpu="cpu", gpus=1)).memory.peak_allocated
        # All rows run in one process: of equal calls the first one's row takes the compiled code, which is less than ONCE.
        found -= trace_model(spec, work, Numerics(device="cpu")).compiled
        assert -8192 <= peak - found <= max(ONCE, 0.002 * found), (row["config"]["model_type"], row["checkpointing"], found, peak)
