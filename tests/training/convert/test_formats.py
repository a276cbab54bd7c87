"""Other programs' formats are read as they were written, told by name, and never run."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.errors import UserError
from toolkit.training.convert.held import Held
from toolkit.training.convert.kinds import find
from toolkit.training.convert.read import hold
from toolkit.training.convert.unpickle import load_metadata
from toolkit.training.convert.write import convert, engine_of
from toolkit.training.convert.zero_write import Engine
from toolkit.training.state import examine

Save = Callable[..., Any]


def same(one: Held, other: Held) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        tensor.shape == other.tensors[key].shape and torch.equal(tensor.whole(), other.tensors[key].whole())
        for key, tensor in one.tensors.items())  # fmt: skip


@pytest.fixture
def ours(save: Save, tiny_model: Path, tokenizer: Any) -> Held:
    return hold(save(tiny_model, tokenizer).checkpoint)


@pytest.mark.parametrize(("to", "engine"), [
    ("dcp", None), ("accelerate-fsdp", None), ("deepspeed-universal", None),
    ("deepspeed", Engine(stage=1, ranks=3)), ("deepspeed", Engine(stage=2, ranks=1, bf16=True)),
    ("deepspeed", Engine(stage=3, ranks=3, sub_group=4000)), ("deepspeed", Engine(stage=3, ranks=2)),
])  # fmt: skip
def test_what_is_written_is_read_again_and_comes_back_the_same(to: str, engine: Any, ours: Held, tmp_path: Path) -> None:
    convert(ours, tmp_path / "theirs", to, engine=engine)
    theirs = hold(tmp_path / "theirs")
    assert theirs.kind == to and theirs.step == ours.step and same(theirs, ours)
    told = examine.inspect(tmp_path / "theirs")
    assert told["kind"] == to and told["kinds"]["exp_avg"]["elements"] == told["kinds"]["weights"]["elements"]
    assert examine.verify(tmp_path / "theirs")["sound"]
    convert(theirs, tmp_path / "step-00000001", "toolkit", model=ours.assets)
    assert same(hold(tmp_path / "step-00000001"), ours) and examine.verify(tmp_path / "step-00000001")["sound"]


def test_uneven_shares_of_many_ranks_are_put_together(ours: Held, tmp_path: Path) -> None:
    convert(ours, tmp_path / "theirs", "deepspeed", engine=Engine(stage=3, ranks=7, sub_group=1000))
    files = sorted(file.name for file in (tmp_path / "theirs" / "pytorch_model").iterdir())
    assert len(files) == 14 and same(hold(tmp_path / "theirs"), ours)
    (tmp_path / "theirs" / "pytorch_model" / "zero_pp_rank_6_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UserError, match=r"lacks zero_pp_rank_6_mp_rank_00_optim_states.pt, the state of rank 6; it may be on"):
        hold(tmp_path / "theirs")


def test_their_own_tools_read_what_is_written(ours: Held, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    for stage in (2, 3):
        convert(ours, tmp_path / f"zero{stage}", "deepspeed", engine=Engine(stage=stage, ranks=2))
        found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / f"zero{stage}"))
        assert torch.equal(found["lm_head.weight"], ours.of("weights")["model.embed_tokens.weight"].whole())
        assert all(torch.equal(found[name], tensor.whole()) for name, tensor in ours.of("weights").items())
    convert(ours, tmp_path / "dcp", "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(content["model"]["lm_head.weight"], content["model"]["model.embed_tokens.weight"])
    assert content["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("to", ["deepspeed", "deepspeed-universal", "dcp", "accelerate-fsdp"])
def test_nothing_that_others_pickled_is_run(to: str, ours: Held, tmp_path: Path) -> None:
    convert(ours, tmp_path / "theirs", to, engine=Engine(stage=2, ranks=2))
    evil = tmp_path / "evil"
    for file in (tmp_path / "theirs").rglob("*"):
        if file.name in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "exp_avg.pt"):
            torch.save({"optimizer_state_dict": Harmful(evil)}, file)
        elif file.name == ".metadata":
            file.write_bytes(pickle.dumps(Harmful(evil)))
    with pytest.raises(UserError, match="is not loaded: it holds more than"):
        hold(tmp_path / "theirs")
    assert not evil.exists()


class ByName:
    """Pickled as a call of getattr, as Python 3.11.2 pickles a member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self.call = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.call


def test_getattr_reaches_members_of_enumerations_and_nothing_else(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(ByName(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")))
    assert load_metadata(file) is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for owner, name in ((_MEM_FORMAT_ENCODING, "__class__"), (OrderedDict, "fromkeys"), (tmp_path, "unlink")):
        file.write_bytes(pickle.dumps(ByName(owner, name)))
        with pytest.raises(UserError, match=r"builtins\.getattr"):
            load_metadata(file)


@pytest.mark.parametrize("missing", [".metadata", "__0_0.distcp"])
def test_a_distributed_checkpoint_without_a_file_names_it(missing: str, ours: Held, tmp_path: Path) -> None:
    convert(ours, tmp_path / "theirs", "accelerate-fsdp")
    (tmp_path / "theirs" / "optimizer_0" / missing).unlink()
    with pytest.raises(UserError, match=rf"optimizer_0.*{missing}"):
        hold(tmp_path / "theirs")


def test_values_that_are_not_finite_are_named(save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    saved = save(tiny_model, tokenizer)
    convert(hold(saved.run), tmp_path / "theirs", "deepspeed-universal")
    file = tmp_path / "theirs" / "pytorch_model" / "zero" / "model.norm.weight" / "exp_avg.pt"
    torch.save({"param": torch.full((48,), float("nan")), "cat_dim": 0}, file)
    with pytest.raises(UserError, match=r"exp_avg of model\.norm\.weight has values that are NaN"):
        examine.verify(tmp_path / "theirs")
    torch.save({"param": torch.ones(47), "cat_dim": 0}, file)
    with pytest.raises(UserError, match=r"exp_avg.pt has 47 elements, the parameter is \[48\]"):
        examine.verify(tmp_path / "theirs")


def test_what_cannot_be_carried_is_said_with_the_way_round(
    save: Save, tiny_model: Path, tokenizer: Any, ours: Held, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="is a checkpoint of this toolkit already; say by --to"):
        convert(ours, out, "toolkit")
    with pytest.raises(UserError, match="--to megatron: there are toolkit, deepspeed"):
        convert(ours, out, "megatron")
    with pytest.raises(UserError, match="was not made by ZeRO, .* or --to deepspeed-universal"):
        engine_of(ours, None, 2)
    settings = {"zero_optimization": {"stage": 3, "sub_group_size": 1e6}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    assert engine_of(ours, tmp_path / "ds.json", 4) == Engine(stage=3, ranks=4, sub_group=10**6, bf16=True)
    with pytest.raises(UserError, match=r"ds.yaml is no DeepSpeed config"):
        engine_of(ours, tmp_path / "ds.yaml", 4)
    adapters = hold(save(tiny_model, tokenizer, method="lora", lora_rank=2, name="lora").run)
    with pytest.raises(UserError, match="holds adapters, and .* holds the frozen base as well; write a universal checkpoint"):
        convert(adapters, out, "dcp")
    bare = Held(kind="dcp", path=tmp_path, tensors={key: t for key, t in ours.tensors.items() if key[0] == "weights"}, step=0)
    with pytest.raises(UserError, match="has no optimizer state, which DeepSpeed's format needs"):
        convert(bare, out, "deepspeed-universal")
    assert not out.exists() and not list(tmp_path.glob(".out*"))


def test_formats_that_are_not_read_are_told(tmp_path: Path) -> None:
    for name, files in {
        "accelerate": ("optimizer.bin", "model.safetensors"), "trainer": ("trainer_state.json", "optimizer.pt"),
        "accelerate-fsdp-full": ("pytorch_model_fsdp.bin", "optimizer.bin"),
        "adapter": ("adapter_config.json", "adapter_model.safetensors"),
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
        assert find(tmp_path / name)[0] == name and examine.inspect(tmp_path / name)["kind"] == name
        with pytest.raises(UserError, match="which is not converted: "):
            hold(tmp_path / name)
