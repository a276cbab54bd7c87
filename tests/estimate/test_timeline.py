"""The thinned timeline says what the estimate says: the same peaks, categories that add up, few points."""

from __future__ import annotations

import json

import pytest

from toolkit.estimate.engine import Estimator
from toolkit.specs import Cluster, ModelSpec, Plan, Workload
from toolkit.specs.detect import make_cluster

CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 256}


def cluster(gpus: int) -> Cluster:
    return make_cluster(gpu="cpu", gpus=gpus, nodes=1, gpu_memory=None, host_memory=None)


@pytest.mark.parametrize(("strategy", "gpus"), [("single", 1), ("fsdp", 2), ("zero3", 2)])
@pytest.mark.parametrize("points", [50, 600])
def test_the_peaks_survive_the_thinning(strategy: str, gpus: int, points: int) -> None:
    estimator = Estimator(ModelSpec(name="tiny", config=CONFIG, source="test"))
    asked = (Workload(seq_len=32, precision="fp32", accumulate=2), Plan(strategy=strategy), cluster(gpus))
    memory = estimator.estimate(*asked).memory
    found = estimator.timeline(*asked, points=points)
    level, second = found["level"], found["steps"][1]
    assert len(level) <= points and len(json.dumps(found)) < 80_000
    assert max(level[:second]) == memory.first_step_peak and max(level[second:]) == memory.peak_allocated
    assert level[found["peak"]] == memory.peak_allocated and sum(found["between"].values()) == memory.resident
    assert [sum(values) for values in zip(*found["categories"].values(), strict=True)] == level
    assert {name: values[found["peak"]] for name, values in found["categories"].items() if values[found["peak"]]} == {
        name: size for name, size in memory.breakdown.items() if size}
    assert [run[2] for run in found["runs"]][1:] == [run[3] for run in found["runs"]][:-1]
    assert {run[0] for run in found["runs"]} >= {"forward", "backward"}
