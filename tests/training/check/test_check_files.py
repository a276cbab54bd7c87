"""Each thing that goes wrong for people in a configuration file is found, named, and told how to put right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.errors import UserError
from toolkit.specs import ModelSpec
from toolkit.strategies.ship import SHIPPED
from toolkit.training.check import Checked, ModelFacts, check_files
from toolkit.training.check.facts import model_facts

ROOT = Path(__file__).parents[3]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 128,
    "decoder_start_token_id": 0,
}
NESTED = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {**LLAMA},
    "vision_config": {"hidden_size": 32},
}


@pytest.fixture(scope="module")
def llama() -> ModelFacts:
    """A four-layer Llama, built on the meta device."""
    return model_facts(ModelSpec(name="tiny-llama", config=LLAMA))


def check(tmp_path: Path, *contents: dict[str, Any], model: ModelFacts | None = None, environ: Any = None) -> Checked:
    """Check contents as files: JSON for DeepSpeed's, YAML for the others."""
    paths = []
    for number, content in enumerate(contents):
        is_json = "zero_optimization" in content
        path = tmp_path / f"{number}.{'json' if is_json else 'yaml'}"
        path.write_text(json.dumps(content) if is_json else yaml.safe_dump(content), encoding="utf-8")
        paths.append(path)
    return check_files(paths, model, environ or {})


def found(checked: Checked, level: str) -> list[str]:
    """`key: message` of the findings of a level."""
    return [f"{finding.key}: {finding.message}" for finding in checked.findings if finding.level == level]


def accelerate(kind: str = "FSDP", **keys: Any) -> dict[str, Any]:
    return {"distributed_type": kind, "num_machines": 1, "num_processes": 8, **keys}


def fsdp(**keys: Any) -> dict[str, Any]:
    section = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return accelerate(fsdp_config={**section, **{f"fsdp_{key}": value for key, value in keys.items()}})


def zero(stage: int = 2, top: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    small = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    if stage == 3:
        small["stage3_gather_16bit_weights_on_model_save"] = True
    return {"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": stage, **small, **keys}, **(top or {})}


def recipe(**keys: Any) -> dict[str, Any]:
    return {"model": "m", "data": "d.jsonl", "output": "run", "max_steps": 10, **keys}


DS = accelerate("DEEPSPEED")
FILE = {"deepspeed_config_file": "1.json"}

ERRORS: list[tuple[tuple[dict[str, Any], ...], str, str]] = [
    # keys
    ((accelerate("MULTI_GPU", num_procesess=8),), "num_procesess", "did you mean 'num_processes'"),
    ((fsdp(versoin=2),), "fsdp_config.fsdp_versoin", "did you mean 'fsdp_version'"),
    ((fsdp(transformer_cls_to_wrap="X"),), "fsdp_config.fsdp_transformer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap"),
    ((accelerate("DEEPSPEED", deepspeed_config={"zero_stge": 2}),), "deepspeed_config.zero_stge", "'zero_stage'"),
    (
        ({**fsdp(), "parallelism_config": {"parallelism_config_dp_shard_size": 8, "tp_size": 2}},),
        "parallelism_config.tp_size",
        "parallelism_config_tp_size",
    ),
    ((zero(reduce_bucket_sise=5),), "zero_optimization.reduce_bucket_sise", "did you mean 'reduce_bucket_size'"),
    ((zero(top={"gradient_cliping": 1.0}),), "gradient_cliping", "did you mean 'gradient_clipping'"),
    ((zero(offload_optimizer={"device": "cpu", "pin_memry": True}),), "pin_memry", "'pin_memory'"),
    ((recipe(learning_rat=1e-5),), "learning_rat", "did you mean 'learning_rate'"),
    ((recipe(seq_len=0),), "", "seq"),
    # values
    ((accelerate("FSPD"),), "distributed_type", "did you mean 'FSDP'"),
    ((accelerate(mixed_precision=False),), "mixed_precision", "write 'no' in quotes"),
    ((accelerate(mixed_precision="bf17"),), "mixed_precision", "it must be no, fp16, bf16 or fp8"),
    ((accelerate("NO"),), "num_processes", "NO runs one process"),
    ((accelerate("MULTI_GPU", num_machines=2, num_processes=7),), "num_processes", "is 7 for 2 machines"),
    ((accelerate("MULTI_GPU", gpu_ids="0,1"),), "gpu_ids", "names 2 GPUs for 8 processes"),
    # a section or a switch for another engine
    ((accelerate("MULTI_GPU", fsdp_config={"fsdp_version": 2}),), "fsdp_config", "is ignored: distributed_type is MULTI_GPU"),
    ((accelerate("FSDP", deepspeed_config={"zero_stage": 2}),), "deepspeed_config", "is ignored"),
    ((accelerate("FSDP", use_cpu=True),), "use_cpu", "ignores FSDP without a word"),
    # two sources of truth
    (
        (accelerate("DEEPSPEED", deepspeed_config={**FILE, "zero_stage": 2, "gradient_clipping": 1.0}), zero()),
        "deepspeed_config",
        "refuses gradient_clipping, zero_stage beside deepspeed_config_file",
    ),
    (
        (accelerate("DEEPSPEED", deepspeed_config=FILE, mixed_precision="bf16"), zero()),
        "deepspeed_config",
        "refuses mixed_precision",
    ),
    (
        (DS, zero(top={"gradient_accumulation_steps": 1}), recipe(accumulate=4)),
        "gradient_accumulation_steps",
        "is 1, but the recipe's accumulate is 4",
    ),
    ((DS, zero(top={"gradient_clipping": 0.5}), recipe()), "gradient_clipping", "the recipe's clip is 1.0"),
    (
        (DS, zero(top={"train_batch_size": 32}), recipe(micro_batch=2)),
        "train_batch_size",
        "micro_batch x accumulate x ranks is 16",
    ),
    ((DS, zero(top={"bf16": {"enabled": True}}), recipe(precision="fp32")), "precision", "the recipe's precision is fp32"),
    ((DS, zero(top={"optimizer": {"type": "AdamW"}}), recipe()), "optimizer", "delete the section"),
    (
        (fsdp(activation_checkpointing=True), recipe(checkpointing="full")),
        "fsdp_config.fsdp_activation_checkpointing",
        "recomputed twice",
    ),
    # "auto" that stays a word
    ((zero(allgather_bucket_size="auto"),), "zero_optimization.allgather_bucket_size", "nothing fills in"),
    ((zero(3, stage3_max_live_parameters="auto"),), "zero_optimization.stage3_max_live_parameters", "nothing fills in"),
    ((zero(top={"wall_clock_breakdown": "auto"}),), "wall_clock_breakdown", "nothing fills in"),
    # DeepSpeed
    ((zero(4),), "zero_optimization.stage", "it must be 0, 1, 2 or 3"),
    ((zero(offload_param={"device": "cpu"}),), "zero_optimization.offload_param", "stage 3 only"),
    ((zero(3, offload_param={"device": "nvme"}),), "zero_optimization.offload_param.nvme_path", "name the folder"),
    ((zero(offload_optimizer={"device": "nvme", "nvme_path": "/d"}),), "zero_optimization.offload_optimizer", "stage 3 only"),
    ((zero(offload_optimizer={"device": "gpu"}),), "zero_optimization.offload_optimizer.device", "none, cpu or nvme"),
    ((zero(top={"bf16": {"enabled": True}, "fp16": {"enabled": True}}),), "fp16", "exclude each other"),
    (
        (zero(top={"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}),),
        "train_batch_size",
        "no multiple of 4 x 1",
    ),
    (
        (accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 2, "offload_param_device": "cpu"}),),
        "deepspeed_config.offload_param_device",
        "stage 3 only",
    ),
    (
        (DS, zero(offload_optimizer={"device": "cpu"}), recipe(optimizer="sgd")),
        "zero_optimization.offload_optimizer",
        "replace sgd by DeepSpeed's CPU Adam",
    ),
    (
        (accelerate("DEEPSPEED", deepspeed_config={"deepspeed_config_file": "gone.json"}),),
        "deepspeed_config.deepspeed_config_file",
        "does not exist",
    ),
    # FSDP
    ((fsdp(sharding_strategy="SHARD_GRAD_OP"),), "fsdp_config.fsdp_sharding_strategy", "fsdp_reshard_after_forward: false"),
    ((fsdp(sharding_strategy="HYBRID_SHARD"),), "fsdp_config.fsdp_sharding_strategy", "dp_replicate_size"),
    ((fsdp(reshard_after_forward="FULL_SHARD"),), "fsdp_config", "must be true or false"),
    ((fsdp(transformer_layer_cls_to_wrap=["A", "B"]),), "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "write A,B"),
    ((fsdp(transformer_layer_cls_to_wrap=""),), "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "names no class"),
    ((fsdp(sync_module_states=False),), "fsdp_config.fsdp_sync_module_states", "the launcher refuses false"),
    ((fsdp(state_dict_type="LOCAL_STATE_DICT"),), "fsdp_config.fsdp_state_dict_type", "SHARDED_STATE_DICT"),
    ((fsdp(activation_checkpointing_offload=True),), "fsdp_config.fsdp_activation_checkpointing_offload", "needs"),
    ((fsdp(), recipe(optimizer="adamw-8bit")), "", "optimizer adamw-8bit and fsdp exclude each other"),
    # meshes
    (({**fsdp(), "parallelism_config": {"parallelism_config_tp_size": 8}},), "parallelism_config", "nothing to shard over"),
    (({**fsdp(), "parallelism_config": {"parallelism_config_dp_shard_size": 4}},), "parallelism_config", "num_processes is 8"),
    (
        ({**fsdp(), "parallelism_config": {"parallelism_config_cp_size": 2, "parallelism_config_sp_size": 4}},),
        "parallelism_config",
        "cp 2 and sp 4 exclude each other",
    ),
    (
        (
            accelerate(
                "MULTI_GPU", parallelism_config={"parallelism_config_dp_replicate_size": 4, "parallelism_config_tp_size": 2}
            ),
        ),
        "parallelism_config",
        "can't go with tp 2",
    ),
    # no file of ours
    (({"name": "something", "steps": []},), "", "is none of the files known here"),
]


@pytest.mark.parametrize(
    ("contents", "key", "words"), ERRORS, ids=[f"{number}-{key}" for number, (_, key, _) in enumerate(ERRORS)]
)
def test_an_error_is_named(contents: tuple[dict[str, Any], ...], key: str, words: str, tmp_path: Path) -> None:
    checked = check(tmp_path, *contents)
    hits = [f for f in checked.findings if f.level == "error" and f.key.endswith(key) and words in f.message]
    assert hits, f"not among {[f.text for f in checked.findings]}"
    assert all("\n" not in f.text for f in checked.findings)
    # The cause is reported once, without a tail of what follows from it.
    assert checked.count("error") == 1, [f.text for f in checked.findings if f.level == "error"]


WARNINGS: list[tuple[tuple[dict[str, Any], ...], str, str]] = [
    ((accelerate(False, num_processes=1),), "distributed_type", "write 'NO' in quotes"),
    ((accelerate("MULTI_GPU", num_machines=2, rdzv_backend="c10d", main_process_ip="1"),), "rdzv_backend", "--rdzv_backend"),
    ((accelerate("MULTI_GPU", num_machines=2),), "main_process_ip", "--machine_rank"),
    (
        (accelerate(fsdp_config={"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),),
        "fsdp_config.fsdp_version",
        "version 1 runs",
    ),
    (
        (accelerate(fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD"}),),
        "fsdp_config.fsdp_sharding_strategy",
        "fails with fewer processes",
    ),
    ((fsdp(use_orig_params=True, backward_prefetch="BACKWARD_PRE"),), "fsdp_config", "does not read fsdp_backward_prefetch"),
    ((fsdp(auto_wrap_policy="NO_WRAP"),), "fsdp_config.fsdp_auto_wrap_policy", "gathered at once"),
    ((fsdp(activation_checkpointing=True), recipe()), "fsdp_config.fsdp_activation_checkpointing", "checkpointing: full"),
    ((accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 2}),), "deepspeed_config.gradient_clipping", "clips at 1.0"),
    ((accelerate("DEEPSPEED", deepspeed_config={"zero_stage": 3}),), "deepspeed_config.zero3_save_16bit_model", "fails after"),
    ((zero(3, stage3_gather_16bit_weights_on_model_save=False),), "save", "fails after the training"),
    (({"zero_optimization": {"stage": 2}},), "gradient_accumulation_steps", "Accelerate puts 1"),
    ((zero(cpu_offload=True),), "zero_optimization.cpu_offload", "write offload_optimizer"),
    ((zero(top={"optimizer": {"type": "AdamW"}}),), "optimizer", "DummyOptim"),
    ((zero(top={"scheduler": {"type": "WarmupLR"}}),), "scheduler", "DummyScheduler"),
    ((zero(top={"optimizer": {"params": {"lr": "auto"}}, "scheduler": {}}),), "optimizer.params.lr", "DummyOptim"),
    ((zero(top={"a_custom_section": {}}),), "a_custom_section", "does not read"),
    ((fsdp(), zero()), "", "none of the Accelerate files here uses it"),
]


@pytest.mark.parametrize(("contents", "key", "words"), WARNINGS, ids=[f"{n}-{key}" for n, (_, key, _) in enumerate(WARNINGS)])
def test_a_warning_is_named_and_is_no_error(contents: tuple[dict[str, Any], ...], key: str, words: str, tmp_path: Path) -> None:
    checked = check(tmp_path, *contents)
    hits = [f for f in checked.findings if f.level == "warning" and f.key.endswith(key) and words in f.message]
    assert hits, f"not among {[f.text for f in checked.findings]}"
    assert checked.count("error") == 0, [f.text for f in checked.findings]


@pytest.mark.parametrize("sections", [(), ("optimizer",), ("scheduler",), ("optimizer", "scheduler")])
def test_four_outcomes_of_optimizer_and_scheduler_sections(sections: tuple[str, ...], tmp_path: Path) -> None:
    alone = check(tmp_path, zero(top={name: {} for name in sections}))
    assert (alone.count("error"), alone.count("warning")) == (0, 1 if sections else 0)
    with_recipe = check(tmp_path, DS, zero(top={name: {} for name in sections}), recipe())
    assert with_recipe.count("error") == len(sections)


def test_shipped_files_have_nothing_wrong(llama: ModelFacts) -> None:
    for shipped in SHIPPED:
        checked = check_files([ROOT / f"recipes/accelerate/{shipped.name}.yaml"], None, {})
        assert [finding.text for finding in checked.findings] == []
        assert checked.plan is not None and checked.plan.label == shipped.name


def test_recipes_that_come_along_have_nothing_wrong() -> None:
    for path in sorted((ROOT / "recipes" / "configs").glob("*.yaml")):
        assert check_files([path], None, {}).count("error") == 0


# -- with a model ----------


def test_a_wrong_layer_class_lists_those_there_are(tmp_path: Path, llama: ModelFacts) -> None:
    checked = check(tmp_path, fsdp(transformer_layer_cls_to_wrap="LlamaLayer"), model=llama)
    assert found(checked, "error") == [
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap: tiny-llama has no class 'LlamaLayer'; its layers are LlamaDecoderLayer"
    ]
    assert check(tmp_path, fsdp(transformer_layer_cls_to_wrap="LlamaDecoderLayer"), model=llama).findings == ()


def test_units_fewer_than_layers(tmp_path: Path, llama: ModelFacts) -> None:
    checked = check(tmp_path, fsdp(transformer_layer_cls_to_wrap="LlamaModel"), model=llama)
    assert "makes 1 units of 4 layers" in found(checked, "warning")[0]
    whole = check(tmp_path, fsdp(auto_wrap_policy="NO_WRAP"), model=llama)
    assert "of 4 layers" in found(whole, "warning")[0]
    size = check(tmp_path, fsdp(auto_wrap_policy="SIZE_BASED_WRAP"), model=llama)
    assert "nothing becomes a unit" in found(size, "warning")[0]


def test_two_layer_classes_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    facts = model_facts(ModelSpec(name="tiny-t5", config=T5))
    assert facts.blocks == ("T5Block",) and facts.layers == 4
    assert check(tmp_path, fsdp(transformer_layer_cls_to_wrap="T5Block,T5LayerFF"), model=facts).count("error") == 0


def test_a_bucket_larger_than_the_model(tmp_path: Path, llama: ModelFacts) -> None:
    for keys, words in (({"reduce_bucket_size": 10**9}, "1,000,000,000 elements"), ({}, "DeepSpeed's default of 500,000,000")):
        content = {"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2, **keys}}
        warning = found(check(tmp_path, content, model=llama), "warning")[0]
        assert words in warning and f"{llama.parameters:,} parameters" in warning


def test_auto_sizes_of_a_nested_config(tmp_path: Path, llama: ModelFacts) -> None:
    nested = ModelFacts(name="vlm", config=NESTED, parameters=10**6, hidden_size=64, blocks=(), layers=0, classes={})
    content = zero(3, reduce_bucket_size="auto", stage3_param_persistence_threshold="auto")
    error = found(check(tmp_path, content, model=nested), "error")[0]
    assert "reduce_bucket_size: 4096, stage3_param_persistence_threshold: 640" in error
    assert check(tmp_path, content, model=llama).count("error") == 0
    unknown = ModelFacts(name="odd", config={}, parameters=10**6, hidden_size=None, blocks=(), layers=0, classes={})
    assert "which odd has not" in found(check(tmp_path, content, model=unknown), "error")[0]


def test_8_bit_and_4_bit_weights_under_a_sharding_engine(tmp_path: Path, llama: ModelFacts) -> None:
    def quantised(**settings: Any) -> ModelFacts:
        config = {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", **settings}}
        return ModelFacts(**{**vars(llama), "config": config})

    eight = check(tmp_path, fsdp(), model=quantised(load_in_8bit=True))
    assert "8-bit goes with single, ddp, zero1 and zero2" in found(eight, "error")[0]
    assert check(tmp_path, accelerate("MULTI_GPU"), model=quantised(load_in_8bit=True)).count("error") == 0
    four = quantised(load_in_4bit=True)
    assert "store them as bfloat16" in found(check(tmp_path, fsdp(), model=four), "error")[0]
    stored = quantised(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    assert check(tmp_path, fsdp(), model=stored).count("error") == 0


def test_a_sequence_longer_than_the_model(tmp_path: Path, llama: ModelFacts) -> None:
    assert "above the 512 positions" in found(check(tmp_path, recipe(seq_len=1024), model=llama), "error")[0]


# -- environment ----------


def test_misspelt_variables_and_curly_quotes(tmp_path: Path) -> None:
    environ = {
        "FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "FSDP_OFFLOAD_PARAMS": "\u201ctrue\u201d",
        "ACCELERATE_USE_FSDP": "maybe",
        "FSDP_VERSION": "2",
        "ACCELERATE_FP8_FORMAT": "E4M3",
        "PATH": "/bin",
    }
    checked = check(tmp_path, accelerate("MULTI_GPU"), environ=environ)
    errors = {finding.key: finding.message for finding in checked.findings if finding.level == "error"}
    assert set(errors) == {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP", "FSDP_OFFLOAD_PARAMS", "ACCELERATE_USE_FSDP"}
    assert "did you mean 'FSDP_TRANSFORMER_CLS_TO_WRAP'" in errors["FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP"]
    assert "curly quotes" in errors["FSDP_OFFLOAD_PARAMS"]
    assert "neither true nor false" in errors["ACCELERATE_USE_FSDP"]


def test_a_forgotten_default_file_is_named_where_no_launch_file_is_given(tmp_path: Path) -> None:
    home = tmp_path / "hf"
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text("distributed_type: FSDP\n", encoding="utf-8")
    alone = check(tmp_path, recipe(), environ={"HF_HOME": str(home)})
    assert any("takes 'FSDP' from this file" in note for note in found(alone, "note"))
    assert not found(check(tmp_path, recipe(), accelerate("MULTI_GPU"), environ={"HF_HOME": str(home)}), "note")


# -- files ----------


def test_a_run_folder_is_taken_as_its_files(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(accelerate("MULTI_GPU", num_machines=3)), encoding="utf-8")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(recipe()), encoding="utf-8")
    checked = check_files([tmp_path], None, {})
    assert [kind for _, kind in checked.files] == ["accelerate", "recipe"]
    assert checked.count("error") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds none of"):
        check_files([tmp_path / "empty"], None, {})


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        check_files([tmp_path / "gone.yaml"], None, {})


def test_several_launch_files_keep_their_own_json() -> None:
    paths = [*sorted((ROOT / "recipes/accelerate").glob("*.yaml")), *sorted((ROOT / "ds_configs").glob("*.json"))]
    checked = check_files(paths, None, {})
    assert len(checked.files) == len(paths) and checked.findings == ()
