"""A step at its highest point: every byte has one category, told by labels first and by birth and death else."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.profiling.test_counter import counted
from toolkit.profiling.breakdown import CATEGORIES, Event, Label, Place, before, break_down
from toolkit.profiling.record import StepRecord, cuda_events, plain_path

PLACES = [
    Place("between", "", False), Place("between", "", False), Place("forward", "layer", False), Place("forward", "head", True),
    Place("forward", "layer", False, collective=True), Place("backward", "head", True), Place("backward", "layer", False),
    Place("optimizer", "", False),
]  # fmt: skip
BATCH, LAYER, HEAD, GATHER, BACK_HEAD, BACK, STEP = range(1, 8)


def test_what_no_label_tells_is_told_by_birth_and_death() -> None:
    events = [
        Event(1, 1000, 0), Event(2, 500, before("forward")),  # held before: a weight, and a library's work space
        Event(3, 16, BATCH), Event(4, 200, LAYER), Event(5, 50, LAYER), Event(5, -50, LAYER), Event(6, 70, GATHER),
        Event(7, 3000, HEAD), Event(8, 40, HEAD, True), Event(7, -3000, BACK_HEAD), Event(6, -70, BACK_HEAD),
        Event(4, -200, BACK), Event(5, 900, BACK), Event(8, -40, BACK), Event(5, -900, STEP), Event(3, -16, STEP),
    ]  # fmt: skip
    found = break_down(events, 2, PLACES, [Label(1, 1, "parameters")])
    wanted = dict.fromkeys(CATEGORIES, 0) | {"parameters": 1000, "temporaries": 500, "activations": 216, "communication": 110,
                                             "logits_and_loss": 3000}
    assert found.categories == wanted and sum(wanted.values()) == found.peak
    assert (found.phase, found.module) == ("forward", "head")
    assert dict(found.by_module) == {"": 16, "layer": 200, "head": 3000}
    assert found.by_phase["backward"]["temporaries"] == 1400 and "optimizer" in found.by_phase


def test_a_label_holds_for_what_lies_there_when_it_is_put() -> None:
    """The same address is a weight's, then a gradient's: each label finds its own."""
    events = [Event(1, 100, 0), Event(9, 10, LAYER), Event(9, -10, HEAD), Event(9, 300, BACK_HEAD), Event(9, -300, STEP)]
    labels = [Label(LAYER + 1, 9, "parameters"), Label(BACK, 9, "communication"), Label(BACK, 9, "gradients"),
              Label(STEP, 5, "gradients")]
    found = break_down(events, 1, PLACES, labels)
    assert found.categories["gradients"] == 300 and found.categories["other"] == 100 and found.peak == 400


def test_buckets_out_of_sight_are_told_by_their_sizes() -> None:
    events = [Event(1, 64, 0), Event(2, 64, 0), Event(3, 32, 0), Event(4, 1, LAYER)]
    found = break_down(events, 3, PLACES, [Label(2, 1, "parameters")], buckets=[64, 32])
    assert found.categories["parameters"] == 64 and found.categories["communication"] == 96


def test_a_step_that_allocates_nothing_has_what_was_held() -> None:
    assert break_down([Event(1, 8, 0)], 1, PLACES, []).peak == 8
    assert break_down([], 0, PLACES, []).peak == 0


def test_the_history_of_cuda_reads_the_same() -> None:
    trace = [{"action": "segment_alloc", "addr": 0, "size": 1 << 21, "user_metadata": "0"},
             {"action": "alloc", "addr": 512, "size": 700, "user_metadata": "2"},
             {"action": "free_requested", "addr": 512, "size": 700, "user_metadata": "5"},
             {"action": "free_completed", "addr": 512, "size": 700, "user_metadata": "5"},
             {"action": "free_requested", "addr": 99, "size": 1}]
    assert cuda_events([(0, 512)], trace) == [Event(0, 512, 0), Event(512, 1024, 2), Event(512, -1024, 5)]


def test_paths_read_as_in_the_model_itself() -> None:
    assert plain_path("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp") == "model.layers.0.mlp"
    assert plain_path("module.base_model.model.model.norm") == "model.norm" and plain_path("module") == ""


def test_a_compiled_model_is_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert StepRecord.possible("allocations", model) and not StepRecord.possible("rss", model)
    model[0].compile()
    assert not StepRecord.possible("cuda", model)


def test_a_real_step_is_split_to_the_byte(tmp_path: Path) -> None:
    found = counted("""
from toolkit.profiling.record import StepRecord
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mlp = torch.nn.Embedding(500, 64), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        self.head = torch.nn.Linear(64, 500, bias=False)
    def get_output_embeddings(self):
        return self.head
    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.mlp(self.embed(ids))), ids)
counter.disregard()
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 500, (400,))
record = StepRecord(model, optimizer, "cpu")
model.register_forward_pre_hook(lambda *_: record.enter("forward"))
model.register_forward_hook(lambda *_: record.enter("backward"))
def step():
    counter.reset()
    model(ids).backward()
    record.enter("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    record.enter("between")
    return counter.peak()
peaks = [step(), step()]
record.begin()
peaks.append(step())
found = record.end()
peaks.append(step())
weights = sum(p.nbytes for p in model.parameters())
hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(p._backward_hooks or {}) for m in model.modules()
            for p in m.parameters())
print(json.dumps([peaks, weights, hooks, found.to_json()]))
""", tmp_path)
    peaks, weights, hooks, detail = found
    assert peaks[1] == peaks[2] == peaks[3] == detail["peak"] == sum(detail["breakdown"].values())
    split = detail["breakdown"]
    assert split["parameters"] == weights and split["optimizer_states"] == 2 * weights + 4 * 4  # a step counter per parameter
    assert split["logits_and_loss"] >= 400 * 500 * 4 and split["other"] == 400 * 8  # the inputs were made before the step
    assert split["activations"] == 2 * 400 * 64 * 4  # what the embedding and the relu give
    assert hooks == 2 * 4  # the loop's own two, once for each parameter
