"""What a checkpoint is exported to is a Hugging Face directory with what the checkpoint holds, whole or not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from toolkit.errors import UserError
from toolkit.training.convert.directory import export
from toolkit.training.convert.kinds import find
from toolkit.training.convert.read import hold
from toolkit.training.export import export_model
from toolkit.training.state import examine

Save = Callable[..., Any]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_it_is_what_the_run_itself_exports(
    save: Save, tiny_model: Path, tokenizer: Any, accelerator: Any, tmp_path: Path
) -> None:
    saved = save(tiny_model, tokenizer, export_dtype="bf16")
    export_model(saved.config, accelerator, saved.model, tokenizer, saved.model_config, tmp_path / "live")
    written = export(hold(saved.run), tmp_path / "out", dtype="bf16", shard_bytes=100_000)
    assert same(weights_in(tmp_path / "out"), weights_in(tmp_path / "live")) and len(written.files) == 2
    assert {file.name for file in (tmp_path / "live").iterdir()} - {"model.safetensors"} <= {
        file.name for file in (tmp_path / "out").iterdir()}  # fmt: skip
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((tmp_path / "live" / name).read_text())
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.use_cache and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not list(tmp_path.glob(".out*"))


def test_names_of_compiled_and_wrapped_models_are_the_models_own(
    save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    saved = save(tiny_model, tokenizer, compiled=True)
    export(hold(saved.run), tmp_path / "out", dtype="fp32")
    assert same(weights_in(tmp_path / "out"), {name: p.detach() for name, p in saved.model.named_parameters()})


def test_experts_are_cut_as_transformers_cuts_them(save: Save, tokenizer: Any, tiny_model: Path, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    saved = save(tmp_path / "moe", tokenizer)
    export(hold(saved.run), tmp_path / "out", dtype="fp32")
    assert weights_in(tmp_path / "out").keys() == weights_in(tmp_path / "moe").keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(loaded.state_dict(), {name: p.detach() for name, p in saved.model.named_parameters()})


def test_a_resized_vocabulary_is_in_weights_config_and_tokenizer(save: Save, tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<a>", "<b>", "<c>"])
    saved = save(tiny_model, tokenizer)
    export(hold(saved.run), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.vocab_size == loaded.lm_head.weight.shape[0] == len(AutoTokenizer.from_pretrained(tmp_path / "out"))
    assert torch.equal(loaded.model.embed_tokens.weight.float(), saved.model.model.embed_tokens.weight)
    shutil.rmtree(saved.checkpoint / "model")  # A checkpoint of before: the folder that is named has the old number of rows.
    forget_assets(saved.checkpoint)
    written = export(hold(saved.run), tmp_path / "old", source=tiny_model)
    assert f"{len(tokenizer)} rows in the checkpoint, {len(tokenizer) - 3} in the config" in written.notes[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "old").lm_head.weight.shape[0] == len(tokenizer)


def forget_assets(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: facts for name, facts in manifest["files"].items() if not name.startswith("model/")}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_adapters_alone_and_in_their_base(save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    saved = save(tiny_model, tokenizer, method="lora", lora_rank=4)
    export(hold(saved.run), tmp_path / "adapter", dtype="fp32")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    trained = {name: p.detach() for name, p in saved.model.named_parameters() if p.requires_grad}
    assert same({name: p.detach() for name, p in loaded.named_parameters() if name in trained}, trained)
    export(hold(saved.run), tmp_path / "merged", dtype="fp32", merge=True)
    expected = loaded.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


def test_two_matrices_where_the_config_ties_one_are_both_kept(
    save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """https://github.com/huggingface/accelerate/issues/3870"""
    both = tmp_path / "both"
    shutil.copytree(tiny_model, both)
    weights = load_file(both / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, both / "model.safetensors", {"format": "pt"})
    saved = save(both, tokenizer)
    assert examine.verify(saved.run)["sound"]
    written = export(hold(saved.run), tmp_path / "out", dtype="fp32")
    assert "lm_head.weight and model.embed_tokens.weight differ though the config ties them" in written.notes[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not loaded.config.tie_word_embeddings and torch.equal(loaded.lm_head.weight, saved.model.lm_head.weight)
    assert torch.equal(loaded.model.embed_tokens.weight, saved.model.model.embed_tokens.weight)


def test_a_checkpoint_of_another_model_is_refused(save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    saved, other = save(tiny_model, tokenizer), tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "intermediate_size": 48}))
    with pytest.raises(UserError, match=r"another model than its config: model\.layers.* is \[.*96.* there, .*48.*; it lacks"):
        export(hold(saved.run), tmp_path / "out", source=other)
    with pytest.raises(UserError, match="holds no adapters: export it without --merge"):
        export(hold(saved.run), tmp_path / "out", merge=True)
    with pytest.raises(UserError, match="--dtype int8: there are auto, fp32"):
        export(hold(saved.run), tmp_path / "out", dtype="int8")
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_half_way_leaves_nothing(
    save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(tiny_model, tokenizer)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(UserError, match="is there already; name a new folder"):
        export(hold(saved.run), tmp_path / "there")
    held = hold(saved.run)
    file = saved.checkpoint / "rank-00000-000.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 4])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        export(held, tmp_path / "out", shard_bytes=30_000)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    with pytest.raises(UserError, match="bytes instead of"):
        hold(saved.checkpoint)


def test_contents_that_are_not_what_was_written_become_no_model(
    save: Save, tiny_model: Path, tokenizer: Any
) -> None:
    saved = save(tiny_model, tokenizer)
    file = saved.checkpoint / "rank-00000-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="the contents of .*rank-00000-000.safetensors are not what was written"):
        hold(saved.run)
    manifest = json.loads((saved.checkpoint / "manifest.json").read_text())
    manifest["files"]["../../other"] = {"bytes": 1, "xxh3": ""}
    (saved.checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"names \.\./\.\./other, which is not in the checkpoint"):
        hold(saved.checkpoint)


def test_the_folder_around_and_the_folder_inside_mean_the_checkpoint(
    save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    saved = save(tiny_model, tokenizer)
    inside = (saved.checkpoint / "model", saved.checkpoint / "rank-00000-000.safetensors", saved.checkpoint)
    for path in (*inside, saved.run / "checkpoints", saved.run, tmp_path):
        assert find(path)[0] == "toolkit" and find(path)[1].samefile(saved.checkpoint)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="holds no complete checkpoint; name a run folder"):
        find(tmp_path / "nothing")
    with pytest.raises(UserError, match="there is no such folder"):
        find(tmp_path / "none")
    with pytest.raises(UserError, match="a model without training state, which is not converted"):
        hold(tiny_model)
    shutil.copytree(saved.run, tmp_path / "second")
    with pytest.raises(UserError, match=r"several checkpoints; name one of .*run/checkpoints/step-00000001, .*second/"):
        find(tmp_path)


MEASURE = """
import re, sys
from pathlib import Path
import transformers, torch, huggingface_hub
from toolkit.training.convert.directory import export
from toolkit.training.convert.read import hold

def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

export(hold(Path(sys.argv[1])), Path(sys.argv[3] + "-small"))  # The code is loaded: what follows is data.
Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
before = resident("VmRSS")
export(hold(Path(sys.argv[2])), Path(sys.argv[3]), dtype=sys.argv[4], shard_bytes=int(sys.argv[5]))
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_stays_under_twice_the_largest_file(
    save: Save, tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Peak resident memory of a process of its own, for 370 MB of fp32 weights in bf16 files of 60 MB."""
    from transformers import AutoConfig

    from toolkit.training.state.manifest import FORMAT
    from toolkit.training.state.store import Fragment, write_fragments

    config = AutoConfig.from_pretrained(tiny_model)
    config.update({"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5,
                   "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128})  # fmt: skip
    step = tmp_path / "step-00000001"
    config.save_pretrained(step / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fragments = (Fragment("weights", name, 0, tuple(p.shape), torch.ones(p.numel())) for name, p in model.named_parameters())
    files = {}
    for number, fragment in enumerate(fragments):
        files |= write_fragments(step, f"rank-{number:05d}", [fragment])
    (step / "state.json").write_text(json.dumps({"progress": {"step": 1, "skipped": 0, "tokens": 0}, "identity": {}}))
    (step / "manifest.json").write_text(json.dumps({"version": FORMAT, "files": files}))
    small, out = save(tiny_model, tokenizer).run, tmp_path / "out"
    words = [sys.executable, "-c", MEASURE, small, step, out, "bf16", str(60 * 10**6)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    largest = max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) > 3 * largest
    assert int(done.stdout.splitlines()[-1]) < 2 * largest
