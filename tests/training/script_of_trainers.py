"""A script that knows nothing of this toolkit: Hugging Face's Trainer, and TRL's SFTTrainer where it is installed.

    script_of_trainers.py MODEL OUTPUT
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

COMMON = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
          "logging_steps": 1, "report_to": [], "save_strategy": "no", "bf16": False}


def finish(trainer: Trainer, output: Path) -> None:
    trainer.train()
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output))
    if trainer.is_world_process_zero():
        record = {"engine": type(trainer.model_wrapped).__mro__[0].__name__, "processes": trainer.args.world_size,
                  "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
        (output / "record.json").write_text(json.dumps(record), encoding="utf-8")


def plain(source: str, output: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = ["One, two, three.", "The cat sat on the mat.", "A longer line of text.", "End."] * 8
    rows = Dataset.from_dict(dict(tokenizer(texts)))
    finish(Trainer(
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), train_dataset=rows,
        args=TrainingArguments(output_dir=str(output), **COMMON), processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)), output)


def supervised(source: str, output: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Say {number}."}],
                               "completion": [{"role": "assistant", "content": f"It is {number}, and {number} again."}]}
                              for number in range(32)])
    finish(SFTTrainer(
        model=source, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(source),
        args=SFTConfig(output_dir=str(output), max_length=64, gradient_checkpointing=False,
                       model_init_kwargs={"dtype": "float32"}, **COMMON)), output)


if __name__ == "__main__":
    plain(sys.argv[1], Path(sys.argv[2]) / "trainer")
    if find_spec("trl"):
        supervised(sys.argv[1], Path(sys.argv[2]) / "sft")
