"""A model spec: a Hugging Face config, where it came from, and what kind of model it describes.

Nothing here imports torch or transformers; `toolkit.timeline.build` turns a spec into a model on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ModelKind = Literal["causal-lm", "seq2seq-lm", "sequence-classification", "token-classification", "encoder"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model, known by its config alone.

    `config` holds the key/values of config.json. `source` says where it was read: a path, `hub:ID` or `catalog:NAME`.
    `published_parameters` is the catalog's figure to check against, or None.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    source: str = ""
    published_parameters: int | None = None
    trust_remote_code: bool = False

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config of the text model: nested multimodal configs keep it under `text_config` and kin."""
        for key in ("text_config", "llm_config", "language_config", "decoder"):
            if isinstance(self.config.get(key), Mapping):
                return self.config[key]
        return self.config

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of a multimodal config is not the text model: `vision`, `audio`."""
        if self.text_config is self.config:
            return ()
        parts = {key.removesuffix("_config"): value for key, value in self.config.items() if key != "quantization_config"}
        return tuple(part for part, value in parts.items() if isinstance(value, Mapping) and value is not self.text_config
                     and part + "_config" in self.config)

    @property
    def architecture(self) -> str:
        """The class that `architectures` names first, or an empty string."""
        names = self.config.get("architectures") or [""]
        return str(names[0])
