"""A model spec becomes a model on fake tensors: the real module code, no weights, no memory.

The full model is built on the meta device, which gives the true parameter list; then its stacks of equal layers are cut
to the few that differ (`Stack`), so that the cost of a trace does not grow with depth.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, nearest
from toolkit.specs import ModelSpec, Workload
from toolkit.timeline.shards import like, local

if TYPE_CHECKING:
    import torch
    from torch import nn

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}
_SUFFIXES = (
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForConditionalGeneration", "seq2seq-lm"),
    ("ForSequenceClassification", "sequence-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForMaskedLM", "sequence-classification"),
)
ENCODER_TYPES = frozenset(("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "deberta-v2", "albert",
                           "camembert", "mpnet", "modernbert"))
SEQ2SEQ_TYPES = frozenset(("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "longt5", "m2m_100", "blenderbot"))


@dataclass(frozen=True)
class Stack:
    """A list of layers of the model and which of them stand for the others."""

    path: str
    """Module path of the list, `model.layers`."""
    kept: tuple[int, ...]
    """Original indices of the layers that were kept, ascending; the first and the last layer always are."""
    stands_for: tuple[int, ...]
    """For each original layer the position in `kept` that represents it."""

    @property
    def depth(self) -> int:
        return len(self.stands_for)


@dataclass(frozen=True)
class BuiltModel:
    model: nn.Module
    """On the meta device, layers cut to `stacks[...].kept`; `materialise` makes its tensors fake CPU tensors."""
    config: Any
    kind: str
    stacks: tuple[Stack, ...]
    block_classes: tuple[str, ...]
    """Classes of the layers, as a wrap policy would name them."""
    parameters: int
    """Elements of the whole model, before it was cut; tied ones once."""

    @property
    def is_cut(self) -> bool:
        """Whether some layers stand for others."""
        return any(len(stack.kept) < stack.depth for stack in self.stacks)


def model_kind(spec: ModelSpec, task: str = "auto") -> str:
    """What the model is trained as: the task asked for, else what its config's architecture says.

    Raises:
        UserError: the config names no architecture and its model type does not tell.
    """
    if task != "auto":
        return task
    model_type = str(spec.config.get("model_type", ""))
    if spec.text_config is not spec.config:
        return "causal-lm"
    if model_type in SEQ2SEQ_TYPES:
        return "seq2seq-lm"
    for suffix, kind in _SUFFIXES:
        if spec.architecture.endswith(suffix):
            return kind
    if model_type in ENCODER_TYPES:
        return "sequence-classification"
    if model_type:
        return "seq2seq-lm" if spec.config.get("is_encoder_decoder") else "causal-lm"
    raise UserError(f"{spec.name}: its config names neither model_type nor architectures, so there is no model to build")


def load_config(spec: ModelSpec) -> Any:
    """The transformers config object of the spec (of its text model, when it is nested).

    Raises:
        UserError: unknown model type, or remote code that was not asked for.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    values = dict(spec.text_config)
    if spec.config.get("auto_map") and not spec.trust_remote_code:
        raise UserError(f"{spec.name}: its config asks for remote code (auto_map); this is refused unless --trust-remote-code "
                        "is given")
    model_type = values.pop("model_type", None)
    if not model_type:
        raise UserError(f"{spec.name}: its config has no model_type, so transformers can't tell which model it is")
    if spec.text_config is not spec.config and "tie_word_embeddings" not in values:
        values["tie_word_embeddings"] = bool(spec.config.get("tie_word_embeddings", True))
    values.pop("transformers_version", None)
    try:
        config = AutoConfig.for_model(model_type, **values)
    except StrictDataclassError as error:
        raise UserError(f"{spec.name}: its config is not right: {' '.join(str(error).split())[:200]}") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        if model_type in CONFIG_MAPPING:
            raise UserError(f"{spec.name}: its config is not right: {' '.join(str(error).split())[:200]}") from None
        known = nearest(str(model_type), CONFIG_MAPPING.keys())
        raise UserError(f"{spec.name}: transformers does not know model type {model_type!r}{known}") from None
    if getattr(config, "num_hidden_layers", 1) == 0:
        raise UserError(f"{spec.name}: its config says num_hidden_layers 0; it must be at least 1")
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.set_verbosity(level)


def build_meta(spec: ModelSpec, workload: Workload, attention: str) -> tuple[nn.Module, Any, str]:
    """The whole model on the meta device: true names, shapes and ties, no memory."""
    import torch
    import transformers

    kind = model_kind(spec, workload.task)
    config = load_config(spec)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if kind == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # which one makes no difference here
    dtype = torch.float32 if workload.loaded_dtype == "fp32" else torch.bfloat16
    auto = getattr(transformers, AUTO_CLASSES[kind])
    if spec.text_config is not spec.config and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return _text_of_multimodal(spec, dtype, attention), config, kind
    with _quiet(), torch.device("meta"):
        try:
            model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
        except ValueError as error:
            text = str(error).splitlines()[0]
            if "Unrecognized configuration class" in text:
                raise UserError(_not_of_a_kind(spec, config, kind)) from None
            if attention != "sdpa" or "scaled_dot_product" not in str(error):
                raise UserError(f"{spec.name}: it can't be built as {kind} with {attention} attention ({text[:160]})") from None
            # As transformers does when no implementation is asked for: eager where the model has no other.
            model = auto.from_config(config, dtype=dtype, attn_implementation="eager")
        except (TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError, ImportError) as error:
            raise UserError(f"{spec.name}: it can't be built from its config ({type(error).__name__}: "
                            f"{' '.join(str(error).split())[:160]})") from None
    return model, model.config, kind


def _not_of_a_kind(spec: ModelSpec, config: Any, kind: str) -> str:
    """The line about a family that is not trained in the way that is asked for, or in none that is estimated."""
    import transformers

    fit = [task for task, auto in AUTO_CLASSES.items() if type(config) in getattr(transformers, auto)._model_mapping
           and not (task == "causal-lm" and getattr(config, "is_encoder_decoder", False))]  # half of what hears or sees
    way = f"say --task {' or '.join(fit)}" if fit else f"only models of text are estimated ({', '.join(AUTO_CLASSES)})"
    return f"{spec.name}: transformers has no {kind} of model type {config.model_type!r}; {way}"


def _text_of_multimodal(spec: ModelSpec, dtype: torch.dtype, attention: str) -> nn.Module:
    """The text model of a family that transformers builds only whole (Qwen2-VL): what sees pictures or sound is left out."""
    import torch
    import transformers

    values = {key: value for key, value in spec.config.items() if key not in ("model_type", "transformers_version")}
    with _quiet(), torch.device("meta"):
        try:
            whole = transformers.AutoConfig.for_model(str(spec.config["model_type"]), **values)
            model = transformers.AutoModelForImageTextToText.from_config(whole, dtype=dtype, attn_implementation=attention)
            inner = model.model
            others = [name for name, part in inner.named_children() if part is not inner.language_model]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{spec.name}: its text model can't be built alone ({' '.join(str(error).split())[:160]})") from None
    for name in others:
        setattr(inner, name, None)
    return model


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """What makes two layers alike for memory: classes, parameter shapes, and what kind of attention they do."""
    parts: list[Any] = [type(layer).__name__, getattr(layer, "attention_type", None)]
    for name, module in layer.named_modules():
        parts.append((name, type(module).__name__, getattr(module, "is_sliding", None),
                      getattr(module, "has_relative_attention_bias", None)))
    parts += [(n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters()]
    return tuple(parts)


def _find_stacks(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """The outermost lists of two or more layers of one class family that hold most of the model."""
    from torch import nn

    found: list[tuple[str, nn.ModuleList]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 1 or any(path.startswith(p + ".") for p, _ in found):
            continue
        if all(sum(1 for _ in child.children()) for child in module):
            found.append((path, module))
    return found


def _choose(signatures: list[tuple[Any, ...]], layer_types: list[Any] | None) -> tuple[list[int], list[int]]:
    """Indices to keep and, for each layer, the position among them of the one that it is like.

    Kept are the first two layers, one later layer of each kind and the last one: a layer that stands for others must
    itself come after a layer of the inner sort, so that what it frees of its predecessor is what they free.
    """
    depth = len(signatures)
    keys = [(s, layer_types[i] if layer_types else None) for i, s in enumerate(signatures)]
    inner: dict[Any, int] = {}
    for i in range(2, depth - 1):
        inner.setdefault(keys[i], i)
    kept = sorted({0, 1, depth - 1, *inner.values()}) if depth > 5 else list(range(depth))
    if len(kept) >= depth:
        return list(range(depth)), list(range(depth))
    position = {index: place for place, index in enumerate(kept)}
    inside = [position[inner[keys[i]]] for i in range(2, depth - 1)]
    return kept, [0, 1, *inside, position[depth - 1]]


def _cut(model: nn.Module, config: Any, whole: bool) -> tuple[tuple[Stack, ...], tuple[str, ...]]:
    """Cut every stack of the model in place and make the config's per-layer lists match; `whole`: find them, and keep all."""
    from torch import nn

    stacks: list[Stack] = []
    classes: dict[str, None] = {}
    for path, layers in _find_stacks(model):
        depth = len(layers)
        types = getattr(config, "layer_types", None)
        signatures = [_signature(layer) for layer in layers]
        kept, stands_for = list(range(depth)), list(range(depth))
        if not whole:
            kept, stands_for = _choose(signatures, types if types and len(types) == depth else None)
        for layer in layers:
            classes[type(layer).__name__] = None
        stacks.append(Stack(path, tuple(kept), tuple(stands_for)))
        if len(kept) == depth:
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        setattr(parent, path.rpartition(".")[2], nn.ModuleList([layers[i] for i in kept]))
        for holder in {id(c): c for c in (config, getattr(parent, "config", None)) if c is not None}.values():
            for key, value in list(vars(holder).items()):
                if isinstance(value, (list, tuple)) and len(value) == depth:
                    setattr(holder, key, [value[i] for i in kept])
            for key in ("num_hidden_layers", "num_layers"):
                if getattr(holder, key, None) == depth:
                    setattr(holder, key, len(kept))
    return tuple(stacks), tuple(classes)


def materialise(model: nn.Module) -> None:
    """Replace meta parameters and buffers by fake CPU tensors (call under a FakeTensorMode); ties stay ties."""
    import torch
    from torch import nn

    memo: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        shard = local(tensor)
        return like(tensor, torch.empty_strided(shard.shape, shard.stride(), dtype=tensor.dtype, device="cpu"))

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                memo[-id(parameter)] = parameter  # keep it alive, so that no other object takes its id
            module._parameters[name] = memo[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in memo:
                memo[id(buffer)] = fake(buffer)
                memo[-id(buffer)] = buffer
            module._buffers[name] = memo[id(buffer)]


_KEPT: dict[str, BuiltModel] = {}
"""The last cut model: the traces of a search differ in what is done with it, and a whole model takes longer to build than to
trace."""


def build(spec: ModelSpec, workload: Workload, attention: str, *, whole: bool = False) -> BuiltModel:
    """The cut model (`whole`: with all its layers) on the meta device; the caller applies adapters and quantization and makes it
    fake."""
    key = json.dumps([spec.name, spec.trust_remote_code, dict(spec.config), workload.task, workload.loaded_dtype, attention,
                      whole], default=str)
    if key not in _KEPT:
        model, config, kind = build_meta(spec, workload, attention)
        parameters = sum(p.numel() for p in model.parameters())
        stacks, classes = _cut(model, config, whole)
        _KEPT.clear()
        _KEPT[key] = BuiltModel(model, config, kind, stacks, classes, parameters)
    return copy.deepcopy(_KEPT[key])
