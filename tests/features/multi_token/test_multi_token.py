"""Modules that predict further tokens: the paper's equations in float64, boundaries of documents, costs, generation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import resolve
from megatron.decoding.one_text import generate
from megatron.decoding.sampling import Sampling
from megatron.model.costs.describe import layers, totals
from megatron.model.multi_token import further_labels
from megatron.model.stack import build_model
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.mesh import Axis
from megatron.testing import check_counts
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative

H, HEADS, WIDTH, V, S, DEPTH, WEIGHT = 24, 4, 40, 37, 11, 3, 0.45
MODEL = {
    "layers": "(attention/mlp) x2",
    "hidden_size": H,
    "vocab_size": V,
    "norm": {"type": "rmsnorm", "epsilon": 1e-6},
    "embedding": {"multiplier": 3.0},
    "attention": {"heads": HEADS, "position": "none"},
    "mlp": {"gated": True, "activation": "silu", "hidden_size": WIDTH},
    "multi_token_prediction": {"depth": DEPTH, "loss_weight": WEIGHT},
}


def built(z_loss: float = 0.0, documents: bool = False, chunk: int = 7, **changes):
    values = {
        "model": {**MODEL, **changes},
        "training": {"steps": 9, "sequence_length": S, "seed": 5, "z_loss": z_loss, "loss_chunk": chunk},
        "data": {"synthetic": "copy", "reset_attention_at_eod": documents},
    }
    model = build_model(resolve(values), dtype=DOUBLE)
    randomise(model, 3)
    return model


def drawn(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, unequal weights of labels, and documents."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (rows, S + 1), generator=draw)
    weights = torch.rand(rows, S, generator=draw, dtype=DOUBLE) * (torch.rand(rows, S, generator=draw) < 0.8)
    return tokens, weights, (torch.rand(rows, S, generator=draw) < 0.3).cumsum(-1)


class Written:
    """Section 2.2 of the paper, token by token of one sample, with the weights of a model."""

    def __init__(self, model):
        self.w = {name: value.detach().clone().requires_grad_() for name, value in named(model).items()}

    @staticmethod
    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    def block(self, index, x, sees):
        w = {name.removeprefix(f"layers.{index}."): each for name, each in self.w.items()}
        y = self.norm(x, w["mixer_norm.weight"])
        key, value = F.linear(y, w["attention.key_value.weight"]).chunk(2, -1)
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(0, 1)
            for each in (F.linear(y, w["attention.query.weight"]), key, value)
        )
        scores = (q @ k.transpose(1, 2) / (H / HEADS) ** 0.5).masked_fill(~sees, -torch.inf)
        x = x + F.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), w["attention.output.weight"])
        y = self.norm(x, w["ffn_norm.weight"])
        gate, up = F.linear(y, w["mlp.gate_up.weight"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w["mlp.down.weight"])

    def losses(self, tokens, weights, documents, z_loss):
        """Of one sample: the sum of the labels' costs of the next token, and of each module's."""
        embedded = 3.0 * self.w["embedding.tokens.weight"][tokens]
        sees = torch.ones(S, S).tril().bool() & (documents[:, None] == documents[None, :])
        x = embedded[:-1]
        for index in range(2):
            x = self.block(index, x, sees)
        h = self.norm(x, self.w["final_norm.weight"])
        head = self.w.get("head.weight", self.w["embedding.tokens.weight"])
        found = []
        for k in range(DEPTH + 1):
            if k:  # h is of positions 0 ... S - 1 - k of the module before
                w = {name.removeprefix(f"layers.{1 + k}."): each for name, each in self.w.items()}
                h = self.norm(h[: S - k], w["hidden_norm.weight"])
                e = self.norm(embedded[k:S], w["embedding_norm.weight"])
                x = self.block(1 + k, F.linear(torch.cat([e, h], -1), w["projection.weight"]), sees[: S - k, : S - k])
                h = self.norm(x, w["output_norm.weight"])
            logits = F.linear(h, head)
            same = documents[: S - k] == documents[k:]
            ce = F.cross_entropy(logits, tokens[k + 1 :], reduction="none") + z_loss * logits.logsumexp(-1).square()
            found.append((weights[k:] * same * ce).sum())
        return torch.stack(found)


@pytest.mark.parametrize(("tied", "apart", "z_loss"), [(False, False, 0.0), (True, True, 0.02)])
def test_the_papers_equations(tied: bool, apart: bool, z_loss: float):
    """Loss and gradients of all parameters. With documents that do not attend to each other, too."""
    model = built(z_loss, apart, embedding={"multiplier": 3.0, "tied": tied}).train()
    tokens, weights, documents = drawn()
    extras = {}
    if apart:
        begins = torch.cat([documents[:, :1] >= 0, documents[:, 1:] != documents[:, :-1]], 1)
        places = torch.arange(S).expand_as(documents)
        extras = {"documents": documents, "positions": places - torch.where(begins, places, 0).cummax(-1).values}
    else:
        documents = torch.zeros_like(documents)
    theirs = Written(model)
    loss, ce = model(tokens[:, :-1], tokens[:, 1:], weights, **extras)
    wanted = torch.stack([theirs.losses(*each, z_loss) for each in zip(tokens, weights, documents)]).sum(0)
    total = wanted[0] + WEIGHT / DEPTH * wanted[1:].sum()
    assert relative(loss, total) < EXACT
    loss.backward()
    total.backward()
    parameters = {each.logical.name: each.grad for each in dict.fromkeys(model.parameters())}
    assert parameters.keys() == theirs.w.keys() and len(parameters) == (49 if tied else 50)
    for name, gradient in parameters.items():
        assert gradient.abs().sum() > 0 and relative(gradient, theirs.w[name].grad) < EXACT, name
    evaluated = model.eval()(tokens[:, :-1], tokens[:, 1:], weights, **extras)[1]
    assert torch.equal(evaluated, ce), "the cross-entropies are those of the next token, in training too"
    if not z_loss:
        sums = model.head.further.sums
        assert relative(sums[0], wanted[1:]) < EXACT
        assert sums[1].tolist() == pytest.approx([weights[:, k:].sum().item() for k in range(1, DEPTH + 1)])


def test_labels_of_further_tokens():
    """By hand: two documents of three and two tokens. The last but one label does not count."""
    labels, weights = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.5]])
    found = further_labels(labels, weights, torch.tensor([[0, 0, 0, 1, 1]]), 2)
    assert found.labels[:, 0].tolist() == [[2, 3, 4, 5, 5], [3, 4, 5, 5, 5]]
    assert found.weights[:, 0].tolist() == [[1.0, 1.0, 0.0, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]
    assert further_labels(labels, weights, None, 1).weights[0, 0].tolist() == [1.0, 1.0, 0.0, 0.5, 0.0]


def test_costs():
    """Parameters. FLOPs of an evaluation, which has no module, and of a step, as torch counts them."""
    values = {"model": MODEL, "training": {"steps": 1, "sequence_length": S, "micro_batch_size": 1}}
    check_counts({**values, "data": {"synthetic": "copy"}})
    model, (tokens, weights, _) = built(chunk=0).train(), drawn(1)  # torch counts no products that are added in place
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens[:, :-1], tokens[:, 1:], weights)[0].backward()
    config = model.plan.config
    assert counter.get_total_flops() / S == totals(config).training_flops
    rows = layers(config)
    assert [row.name for row in rows] == ["embedding", "layers.0", "layers.1", "head"]
    full = {"steps": 1, "sequence_length": S, "activation_checkpointing": {"mode": "full"}}
    recomputed, block = resolve({"model": MODEL, "training": full}), rows[1].counts
    assert layers(recomputed)[-1].recomputed == DEPTH * block.flops
    assert layers(recomputed)[-1].saved == rows[-1].saved - DEPTH * (block.activations - H)


def test_text_is_that_of_the_model_without_modules():
    """The same initial values, the same text: nothing but training knows of the modules."""
    model, plain = built().eval(), built(multi_token_prediction={}).eval()
    names = set(named(model)) - set(named(plain))
    assert {name.split(".")[1] for name in names} == {"2", "3", "4"}
    fresh = [build_model(each.plan.config, dtype=DOUBLE) for each in (model, plain)]
    for name, value in named(fresh[1]).items():
        assert torch.equal(value, named(fresh[0])[name]), name
    model.load_state_dict(plain.state_dict(), strict=False)
    prompt, greedy = drawn(1)[0][:, :5], Sampling(temperature=0.0)
    assert list(generate(model, prompt, 6, greedy)) == list(generate(plain, prompt, 6, greedy))


def test_a_part_of_each_sample_makes_no_labels():
    model = built().train()
    model.head.context = ContextGroup(Axis(size=2, ranks=(0, 1)))
    tokens, weights, _ = drawn()
    with pytest.raises(ValueError, match="made of whole samples"):
        model(tokens[:, :-1], tokens[:, 1:], weights)
