"""The model and its tokenizer, from a hub id, a directory, a GGUF file, or a config with random weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from toolkit.errors import UserError
from toolkit.training.accelerator import without_sharded_init
from toolkit.training.config import TrainConfig
from toolkit.training.gguf import as_directory
from toolkit.training.heartbeat import write_line
from toolkit.training.loss import attach_loss

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_MAX_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True)
class Source:
    """Where a model is loaded from."""

    path: str
    """A directory, or a hub id."""
    random: bool
    """Only the config is read; the weights are drawn from the seed."""

    @property
    def is_directory(self) -> bool:
        return Path(self.path).is_dir()


def _told(what: str, load: Callable[[], T]) -> T:
    """Turn what a library raises about a model into one line for the user."""
    try:
        return load()
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:300]}") from None


def check_source(config: TrainConfig) -> None:
    """Find what is wrong with a local model before anything is started. Raises UserError."""
    name = config.model
    if name.startswith("config:"):
        if not (Path(name.removeprefix("config:")) / "config.json").is_file():
            raise UserError(f"model={name}: there is no config.json in {name.removeprefix('config:')!r}")
        return
    path = Path(name)
    if name.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"model={name}: the file does not exist")
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model={name}: the directory has no config.json")
        if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
            raise UserError(f"model={name}: the directory has no weights (*.safetensors); "
                            f"for random weights write model=config:{name}")
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"model={name}: neither a directory, a .gguf file nor a hub id")


def find_source(config: TrainConfig, accelerator: Accelerator) -> Source:
    """The directory or hub id to load from; a GGUF file is turned into a directory once, by one process per
    node."""
    if config.model.startswith("config:"):
        return Source(config.model.removeprefix("config:"), random=True)
    if not config.model.endswith(".gguf"):
        return Source(config.model, random=False)
    with accelerator.local_main_process_first():
        return Source(str(as_directory(Path(config.model))), random=False)


def load_tokenizer(config: TrainConfig, source: Source) -> Any:
    """The model's tokenizer, with a padding token. Raises UserError."""
    from transformers import AutoTokenizer

    what = f"model={config.model}: the tokenizer cannot be loaded"
    tokenizer = _told(what, lambda: AutoTokenizer.from_pretrained(
        source.path, revision=_revision(config, source), trust_remote_code=config.trust_remote_code))
    if tokenizer.pad_token_id is None:
        # Padding stands to the right and has no targets, so any existing token will do.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    return tokenizer


def load_config(config: TrainConfig, source: Source) -> Any:
    """The model's config, held against the run's sequence length. Raises UserError."""
    from transformers import AutoConfig

    found = _told(f"model={config.model}: its config cannot be read", lambda: AutoConfig.from_pretrained(
        source.path, revision=_revision(config, source), trust_remote_code=config.trust_remote_code))
    text = found.get_text_config()
    limit = next((value for key in _MAX_POSITIONS if (value := getattr(text, key, None)) is not None), None)
    if limit is not None and 0 < limit < config.seq_len:
        raise UserError(f"seq_len={config.seq_len} is above the model's {limit} positions; "
                        f"use seq_len={limit} or less")
    return found


def _model_class(model_config: Any) -> type | None:
    """transformers' own class for the config; None for remote code."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    except KeyError:
        return None


def isolates_by_position(model_config: Any) -> bool:
    """Whether the model takes position ids, by which samples that share a row are kept apart."""
    model_class: Any = _model_class(model_config)
    return model_class is not None and "position_ids" in inspect.signature(model_class.forward).parameters


def _attention(config: TrainConfig, model_config: Any) -> str:
    """The attention implementation; eager for the few models that have no other, as transformers chooses by itself."""
    if config.attention == "sdpa" and getattr(_model_class(model_config), "_supports_sdpa", True) is False:
        return "eager"
    return _ATTENTION[config.attention]


def _revision(config: TrainConfig, source: Source) -> str | None:
    return None if source.is_directory else config.revision


def build_model(config: TrainConfig, source: Source, model_config: Any, tokenizer: Any,
                accelerator: Accelerator) -> Any:
    """The model as it goes into `Accelerator.prepare`: weights, attention, adapters, checkpointing, summed
    loss.

    Raises:
        UserError: it cannot be built as configured.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {
        "dtype": DTYPES[config.workload.loaded_dtype],
        "attn_implementation": _attention(config, model_config),
        "trust_remote_code": config.trust_remote_code,
    }
    torch.manual_seed(config.seed)
    what = f"model={config.model}: it cannot be built"
    if source.random:
        with without_sharded_init(accelerator):
            model = _told(what, lambda: AutoModelForCausalLM.from_config(model_config, **options))
    else:
        if config.method == "qlora":
            options["quantization_config"] = _four_bit()
            options["device_map"] = {"": accelerator.local_process_index}
        model = _told(what, lambda: AutoModelForCausalLM.from_pretrained(
            source.path, config=model_config, revision=_revision(config, source), **options))
        if accelerator.distributed_type == "NO" and accelerator.device.type == "cpu":
            _take_from_file(model)
    vocabulary = len(tokenizer)
    if vocabulary > model.get_input_embeddings().num_embeddings:
        if config.method != "full" and accelerator.is_main_process:
            added = vocabulary - model.get_input_embeddings().num_embeddings
            write_line(f"warning: the tokenizer has {added} tokens more than the model; their embeddings are new, and method="
                       f"{config.method} neither trains nor saves them: use method=full, or a model that already has them")
        model.resize_token_embeddings(vocabulary)
    model.config.use_cache = False
    _set_checkpointing(model, config.checkpointing)
    if config.method != "full":
        model = _with_adapters(model, config)
    model.train()
    attach_loss(model, config.loss)
    return model


def _take_from_file(model: Any) -> None:
    """Copy the weights into memory of their own, one after the other. safetensors maps them from the file; an engine or a GPU
    copies them anyway, one process on a CPU would train on the mapped pages, which no allocator counts and which end with the
    file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _four_bit() -> Any:
    """NF4 with double quantization, stored in bf16 words so that sharding engines can split it. Raises
    UserError."""
    if find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        installed = find_spec("bitsandbytes") is not None
        lacking = "a CUDA device" if installed else "bitsandbytes, which is not installed"
        raise UserError(f"method=qlora needs {lacking}; use method=lora")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip


def _set_checkpointing(model: Any, kind: str) -> None:
    """Recompute each block in the backward pass; selective keeps what matrix products and attention gave."""
    if kind == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _kept_operators())
    model.gradient_checkpointing_enable(options)


def _kept_operators() -> list[Any]:
    """The operators that are dear to run again: matrix products and attention."""
    aten = torch.ops.aten
    return [
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]  # fmt: skip


def _with_adapters(model: Any, config: TrainConfig) -> Any:
    from peft import LoraConfig, get_peft_model

    named = config.lora_targets
    targets = named if named == "all-linear" else [part.strip() for part in named.split(",") if part.strip()]
    settings = LoraConfig(r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules=targets,
                          task_type="CAUSAL_LM")
    torch.manual_seed(config.seed)
    return _told(f"lora_targets={named}", lambda: get_peft_model(model, settings))


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters, tied ones once; under ZeRO-3's init the true sizes."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)
