"""A model whose states are some GiB, so that it matters how it is spread, and machines of any size for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toolkit.planner.search import Request
from toolkit.specs import Cluster, ModelSpec, Workload
from toolkit.specs.detect import make_cluster
from toolkit.units import GIB

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
WORK = Workload(seq_len=64, loss_only=True)
Ask = Callable[..., Request]


def machines(gib: float, gpus: int, host: int | None) -> Cluster:
    """GPUs with so much memory; the host holds anything unless `host` bytes are given."""
    return make_cluster("a100-80gb-sxm", gpus=gpus, gpu_memory=int(gib * GIB), host_memory=host)


@pytest.fixture(scope="session")
def ask() -> Ask:
    """`ask(gib, gpus=4, ...)`: a request for the model; other names are the request's fields or the workload's."""

    def make(gib: float, gpus: int = 4, host: int | None = None, *, work: Workload = WORK, **fields: object) -> Request:
        values = {"margin": 0.0, "fixed_micro_batch": True, **fields}
        return Request(ModelSpec(name="wide", config=CONFIG), work, machines(gib, gpus, host), **values)  # type: ignore[arg-type]

    return make
