"""Reading what others pickled, without running what they could have put in: only plain data, tensors, and the few classes that
these formats need, of which stand-ins are made here that keep the values and do nothing."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError

_DCP = "torch.distributed.checkpoint."
_DCP_NAMES = {
    *((_DCP + "metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                                             "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (_DCP + "filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
}  # fmt: skip


class Record:
    """Stands in for a class of DeepSpeed's: its attributes are what was saved."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def _member(owner: Any, name: Any) -> Any:
    """A member of an enumeration, which Python up to 3.11.3 pickles as a call of `getattr`. Raises UnpicklingError."""
    if not isinstance(owner, enum.EnumMeta) or name not in owner.__members__:
        raise pickle.UnpicklingError("builtins.getattr")
    return owner.__members__[name]


_STAND_INS = [
    (type("LossScaler", (Record,), {}), "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (type("DynamicLossScaler", (Record,), {}), "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (type("FragmentAddress", (Record,), {}), "deepspeed.utils.tensor_fragment.fragment_address"),
    (type("SubparamShape", (Record,), {}), "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (enum.IntEnum("ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}),
     "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
]


def load(path: Path) -> Any:
    """What torch.save wrote, with tensors mapped from the file.

    Raises:
        UserError: it is not whole, or holds anything but data.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is not loaded: it holds more than data ({_named(error)}), and loading it would run code that "
                        "came with it; save it again without client state of your own classes") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} is not a whole torch file: {' '.join(str(error).split())[:160]}") from None


def _named(error: Exception) -> str:
    words = str(error).replace("`", " ").split()
    return next((word for word in words if word.count(".") and word.replace(".", "").replace("_", "").isalnum()), "an object")


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _DCP_NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def load_metadata(path: Path) -> Any:
    """The `.metadata` of a torch distributed checkpoint. Raises UserError."""
    try:
        with path.open("rb") as file:
            return _Metadata(file).load()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the save was never finished, or the file is on the node of the first rank") from None
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is not loaded: it holds more than a distributed checkpoint's description ({error})") from None
    except (OSError, EOFError, ValueError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:160]}") from None
