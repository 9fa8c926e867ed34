"""Sorting parameters, and the two optimizers behind one."""

import copy
import io

import pytest
import torch
from torch import nn

from dist_lib.models import Decoder, get_config
from dist_lib.optim import Muon, MuonWithAdamW, split_parameters


class Zoo(nn.Module):
    """One of everything that needs a rule."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.fused = nn.Linear(8, 24, bias=True)
        self.experts = nn.Parameter(torch.zeros(4, 8, 6))
        self.stem = nn.Conv2d(3, 8, 3)
        self.gate = nn.Linear(8, 1, bias=False)
        self.norm = nn.LayerNorm(8)
        self.old = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.to_words = nn.Linear(8, 11, bias=False)
        self.lm_head = nn.Linear(8, 17, bias=False)
        self.twice = self.fused


def test_the_decoder_is_split_by_rule():
    model = Decoder(get_config("tiny-0.3m"))
    split = split_parameters(model)
    assert len(split.muon) == 7 * model.config.n_layers
    assert all(name.endswith("_proj.weight") for name, _ in split.muon)
    assert split.reasons["embed_tokens.weight"] == "embedding, tied with lm_head.weight"
    assert {n for n, _ in split.adamw} == {n for n, _ in model.named_parameters()} - {n for n, _ in split.muon}
    text = split.explain()
    assert len(text.splitlines()) == len(list(model.parameters())) and "vector or scalar (norm, bias)" in text


def test_every_kind_of_parameter_has_a_place_and_a_reason():
    split = split_parameters(Zoo())
    assert [n for n, _ in split.muon] == ["experts", "fused.weight"]
    assert split.frozen == ["old.weight"]
    reasons = {
        "wte.weight": "embedding",
        "pos_embed": "embedding by its name",
        "fused.bias": "vector or scalar (norm, bias)",
        "experts": "stack of 4 matrices",
        "stem.weight": "convolution kernel (Muon takes it with flatten=True)",
        "gate.weight": "a single row or column: orthogonalising only normalises it",
        "to_words.weight": "output head: a linear layer with the shape of an embedding",
        "lm_head.weight": "output head by its name",
        "old.weight": "frozen: requires_grad is False",
    }
    assert {name: split.reasons[name] for name in reasons} == reasons
    assert len(split.reasons) == len(list(Zoo().named_parameters()))


def test_a_rule_of_the_caller_comes_first():
    rule = {"lm_head.weight": "muon", "experts": "adamw", "stem.weight": "muon"}.get
    split = split_parameters(Zoo(), rule=lambda name, p: rule(name))
    assert {n for n, _ in split.muon} == {"fused.weight", "lm_head.weight", "stem.weight"}
    with pytest.raises(ValueError, match=r"the rule returned 'muon' for fused.bias of shape \(24,\)"):
        split_parameters(Zoo(), rule=lambda name, p: "muon")
    with pytest.raises(ValueError, match="'sgd'"):
        split_parameters(Zoo(), rule=lambda name, p: "sgd")


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def tiny():
    return Decoder(get_config("tiny-0.3m"), seed=1)


def test_the_combined_optimizer_equals_the_two():
    model, twin = tiny(), tiny()
    combined = MuonWithAdamW(model, lr=0.01, adamw_lr=0.002, momentum=0.9)
    split = split_parameters(twin)
    muon = Muon(split.muon, lr=0.01, momentum=0.9)
    adamw = torch.optim.AdamW([p for _, p in split.adamw], lr=0.002, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        for m in (model, twin):
            gradients(m, step)
        combined.step()
        muon.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert [g["name"] for g in combined.param_groups] == ["muon", "adamw"]
    combined.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_state_schedulers_and_copies_of_the_combined_optimizer():
    def trained(restart):
        model = tiny()
        optimizer = MuonWithAdamW(model, lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s)
        for step in range(4):
            if restart and step == 2:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                fresh = MuonWithAdamW(model, lr=77.0)
                fresh.load_state_dict(torch.load(file, weights_only=True))
                optimizer = copy.deepcopy(fresh)
                for mine, theirs in zip(optimizer.param_groups, fresh.param_groups, strict=True):
                    assert len(mine["params"]) == len(theirs["params"]) and mine["params"][0] is not theirs["params"][0]
                optimizer = fresh
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s, last_epoch=1)
            gradients(model, step)
            optimizer.step()
            schedule.step()
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_both_step_or_neither():
    model = tiny()
    optimizer = MuonWithAdamW(model, lr=0.01)
    gradients(model, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    momentum = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    model.norm.weight.grad[0] = float("nan")  # AdamW's parameter
    with pytest.raises(FloatingPointError):
        optimizer.step()
    optimizer.nonfinite = "skip"
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(momentum[p][k], v) for p, s in optimizer.state.items() for k, v in s.items())


def test_groups_are_added_to_the_one_that_is_named():
    optimizer = MuonWithAdamW(nn.Linear(4, 4), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))], "name": "muon", "param_names": ["more"]})
    optimizer.add_param_group({"params": [("b", nn.Parameter(torch.zeros(3)))], "name": "adamw"})
    assert [g["name"] for g in optimizer.param_groups] == ["muon", "muon", "adamw", "adamw"]
    with pytest.raises(ValueError, match="'muon' or 'adamw'"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="already has an optimizer"):
        optimizer.add_param_group({"params": optimizer.adamw.param_groups[0]["params"], "name": "muon"})
    with pytest.raises(ValueError, match="AdamW alone"):
        MuonWithAdamW(nn.LayerNorm(3))
    only = MuonWithAdamW(nn.Linear(4, 4, bias=False))
    assert only.adamw is None and len(only.param_groups) == 1
