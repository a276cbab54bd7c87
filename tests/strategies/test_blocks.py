"""The layers of a model are found by its own hints, and without them by what repeats."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.strategies.fsdp.blocks import block_classes


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)


class Layer(nn.Module):
    """A layer with a list of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(4)])


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Plain(nn.Module):
    """A model without a word about its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([Layer(), Layer(), Other(), Layer(), Other()])
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])


def test_what_repeats_is_a_layer_and_what_is_inside_is_not() -> None:
    assert block_classes(Plain()) == ("Layer", "Other")


def test_hints_come_first_as_far_as_the_model_has_them() -> None:
    model = Plain()
    model._no_split_modules = ["Layer", "Absent"]  # type: ignore[assignment]
    assert block_classes(model) == ("Layer",)
    model._no_split_modules = None  # type: ignore[assignment]
    assert block_classes(model) == ("Layer", "Other")


def test_a_model_that_repeats_nothing_has_none() -> None:
    assert block_classes(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ()
    assert block_classes(nn.Linear(2, 2)) == ()


def test_models_of_transformers_on_the_meta_device() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64))
        t5 = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, num_layers=2, num_heads=2, vocab_size=64))
    assert block_classes(gpt2) == ("GPT2Block",) and block_classes(t5) == ("T5Block",)
    gpt2._no_split_modules = None
    assert block_classes(gpt2) == ("GPT2Block",)
