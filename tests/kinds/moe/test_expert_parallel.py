"""Experts spread over ranks: outputs, gradients and bytes of one layer, against the whole layer on one rank."""

from __future__ import annotations

import pytest
import torch

from bench.messages.expert_traffic import Traffic, counted, send_everything
from megatron.config import resolve
from megatron.kinds.moe.layer import MoE
from megatron.model.initialisation import Initialisation
from megatron.model.stream import Stream
from megatron.parallel.layers.parameters import ParameterFactory
from megatron.parallel.layout.layout import Coordinates, Layout
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, own_part, relative
from tests.selection import toured
from tests.workers import run

H, S, B = 16, 12, 2
OPTIONS = {
    "top_k": {"experts": 8, "top_k": 3, "hidden_size": 16, "shared_size": 8, "router": {"bias": True}},
    "capacity": {"experts": 4, "top_k": 2, "hidden_size": 16, "capacity_factor": 1.0},
    "expert choice": {"experts": 4, "top_k": 2, "hidden_size": 16, "router": {"select": "expert_choice"}},
    "no expert": {
        "experts": 4,
        "top_k": 1,
        "hidden_size": 16,
        "router": {"network": "mlp", "width": 8, "average": False, "skip": True, "correction": "sign"},
    },
    # Logits are large and the same for all tokens: every token takes expert 1, so most ranks get nothing.
    "one for all": {"experts": 4, "top_k": 1, "hidden_size": 16, "router": {"bias": True}},
}


def layer(mesh: Mesh, case: str) -> MoE:
    """The layer on this rank, with random values that no layout changes."""
    config = resolve({
        "model": {"layers": "moe", "hidden_size": H, "vocab_size": 8, "moe": OPTIONS[case]},
        "training": {"steps": 1, "sequence_length": S},
    })
    make = ParameterFactory(mesh, dtype=DOUBLE).scope("moe")
    made = MoE(make, config.model, config.model.moe, Initialisation(config.model.init, H, 1))
    with torch.no_grad():
        for name, parameter in named(made).items():
            whole = (
                torch.randn(parameter.logical.shape, generator=torch.Generator().manual_seed(sum(name.encode()))) / 2
            )
            parameter.copy_(cut(whole, parameter))
        if case == "one for all":
            made.router.weight.zero_()
            made.router.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    return made


def cut(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return own_part(whole, parameter.logical.spans(*parameter.cut, getattr(parameter, "run", None)))


def batch(data: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of a data parallel rank, and the weights of its outputs."""
    draw = torch.Generator().manual_seed(100 + data)
    return tuple(torch.randn(B, S, H, generator=draw).to(DOUBLE) for _ in range(2))


def step(layout: Layout, case: str, everything: bool = False):
    """Of this rank: output, gradients of the input and the parameters (whole by data rank, of experts by run), traffic.

    Args:
        everything: tensor parallel ranks send all their tokens.
    """
    mesh = Mesh.build(layout) if layout.world_size > 1 else Mesh.single()
    moe = layer(mesh, case)
    if everything:
        moe.exchange = send_everything(mesh)
    x, weight = batch(mesh.data.rank)
    own = slice(mesh.tensor.rank * S // mesh.tensor.size, (mesh.tensor.rank + 1) * S // mesh.tensor.size)
    if layout.sequence:
        x, weight = x[:, own], weight[:, own]
    x = x.clone().requires_grad_()
    with counted() as traffic:
        y = outputs_of(moe, x)
        (y * weight).sum().backward()
    gradients = {name: (p.grad, getattr(p, "run", None)) for name, p in named(moe).items()}
    return y.detach(), x.grad, gradients, traffic


def outputs_of(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    y = moe(x, Stream(x))
    return y if isinstance(y, torch.Tensor) else y[0]


def whole(case: str, ranks: int):
    """The same for each data parallel rank's tokens, on a layer that has all experts. Gradients of parameters
    summed."""
    outputs, total = [], {}
    for data in range(ranks):
        moe, (x, weight) = layer(Mesh.single(), case), batch(data)
        y = outputs_of(moe, x.requires_grad_())
        (y * weight).sum().backward()
        outputs.append((y.detach(), x.grad))
        for name, parameter in named(moe).items():
            total[name] = total.get(name, 0) + parameter.grad
    return outputs, total


@pytest.mark.parametrize(
    "layout",
    toured(
        [
            Layout(data=2, expert=2),
            Layout(data=4, expert=4),
            Layout(data=4, expert=2),
            Layout(data=2, tensor=2, expert=2),
            Layout(data=2, tensor=2, expert=2, sequence=True),
            Layout(data=2, tensor=2, expert=4, folded=True),
            Layout(data=2, tensor=2, expert=2, folded=True, sequence=True),
            Layout(data=1, tensor=2, expert=1, folded=True),
            Layout(data=1, tensor=4, expert=2, folded=True),
        ],
        "layouts",
    ),
    ids=[
        "ep2",
        "ep4",
        "dp4 ep2",
        "tp2 ep2",
        "tp2 ep2 sequence",
        "tp2 folded ep4",
        "tp2 folded ep2 sequence",
        "tp2 folded ep1",
        "tp4 folded ep2",
    ],
)
def test_equals_the_whole_layer(layout: Layout):
    for case in OPTIONS:
        outputs, total = whole(case, layout.data)
        answers = run(layout.world_size, step, layout, case)
        summed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for rank, (y, x_grad, gradients, _) in enumerate(answers):
            at = layout.coordinates(rank)
            own = (
                slice(at.tensor * S // layout.tensor, (at.tensor + 1) * S // layout.tensor)
                if layout.sequence
                else slice(None)
            )
            assert relative(y, outputs[at.data][0][:, own]) < EXACT, (case, rank)
            assert relative(x_grad, outputs[at.data][1][:, own]) < EXACT, (case, rank)
            for name, (gradient, experts) in gradients.items():
                assert (experts is not None) == name.startswith("moe.experts."), name
                apart = layout.folded and experts is not None  # each has whole experts, and worked for other tokens
                if at.tensor and not apart:  # shards of the others are compared by test_layouts
                    continue
                expected = total[name] if apart else of_first(total[name], name, layout, case)
                place, _ = summed.setdefault(name, (torch.zeros_like(expected), expected))
                where = slice(None) if experts is None else slice(experts.start, experts.stop)
                place[where] += gradient
        for name, (gradient, expected) in summed.items():
            error = (gradient - expected).norm() / expected.norm().clamp(min=1e-3)
            assert error < EXACT, (case, name, float(error))


def of_first(value: torch.Tensor, name: str, layout: Layout, case: str) -> torch.Tensor:
    """The part of a whole tensor that tensor parallel rank 0 has, of all experts."""
    logical = named(layer(Mesh.single(), case))[name].logical
    return own_part(value, logical.spans(0, layout.tensor))


def sent(layout: Layout) -> list[Traffic]:
    return [answer[3] for answer in run(layout.world_size, step, layout, "top_k")]


def crossing(place, share=lambda token: 0) -> int:
    """Bytes of one way of all rows to other ranks: of k = 3 choices of each token, those whose expert is elsewhere.

    Args:
        place: the expert parallel rank of an expert.
        share: further difference between the ranks of a data parallel index, as a function of the token.
    """
    rows = 0
    for data in range(2):
        for token, experts in enumerate(choices(data).tolist()):
            rows += sum(place(expert) != (data, share(token)) for expert in experts)
    return rows * H * 8


def test_no_token_crosses_the_expert_axis_twice():
    """Two data parallel ranks send as much whether each is one rank or two tensor parallel ones, which have the same
    tokens.
    """
    one, two = sent(Layout(data=2, expert=2)), sent(Layout(data=2, tensor=2, expert=2))
    assert all(each.exchanges == 4 for each in (*one, *two)), "two exchanges forward and two backward"
    way = crossing(lambda expert: (expert // 4, 0))
    assert sum(each.exchanged for each in one) == sum(each.exchanged for each in two) == 4 * way
    assert max(each.exchanged for each in two) < 0.75 * max(each.exchanged for each in one)


def test_what_dropping_duplicates_saves():
    """Half of the bytes of the all-to-all, where two ranks have the same tokens. The rows that arrive go over the
    tensor axis instead.
    """
    layout = Layout(data=2, tensor=2, expert=2)
    everything, share = (run(4, step, layout, "top_k", how) for how in (True, False))
    for one, other in zip(everything, share):
        assert relative(one[0], other[0]) < EXACT and relative(one[1], other[1]) < EXACT
    assert sum(answer[3].exchanged for answer in everything) == 2 * sum(answer[3].exchanged for answer in share)
    for rank, answer in enumerate(share):
        expert_rank, arrived = layout.coordinates(rank).data, [0, 0]
        for data in range(2):
            for token, experts in enumerate(choices(data).tolist()):
                arrived[token * 2 // (B * S)] += sum(expert // 4 == expert_rank for expert in experts)
        assert answer[3].gathered == 4 * max(arrived) * H * 8, (
            "a gather and a sum each way, of as many rows as one has at most"
        )
    assert all(answer[3].gathered == 0 for answer in everything)


def test_folded_experts_send_over_one_axis():
    """Two experts on each of four ranks: a token's sender is its tensor parallel share's, and nothing is gathered."""
    traffic = sent(Layout(data=2, tensor=2, expert=4, folded=True))
    way = crossing(lambda expert: divmod(expert // 2, 2), lambda token: token * 2 // (B * S))
    assert sum(each.exchanged for each in traffic) == 4 * way
    assert all((each.exchanges, each.gathered) == (4, 0) for each in traffic)


def choices(data: int) -> torch.Tensor:
    """The experts of a data parallel rank's tokens, from the definition."""
    moe, (x, _) = layer(Mesh.single(), "top_k"), batch(data)
    return (x.flatten(0, 1) @ moe.router.weight.T + moe.router.bias).topk(3, dim=-1).indices


def test_axes():
    """Neighbours on the data axis share the experts. Every expert-th rank holds the same ones (16 ranks, tensor 2,
    expert 4).
    """
    layout = Layout(tensor=2, data=8, expert=4)
    at = layout.coordinates(5)
    assert at == Coordinates(tensor=1, data=2)
    assert [layout.rank(each) for each in layout.all_experts(at)] == [1, 3, 5, 7]
    assert [layout.rank(each) for each in layout.same_experts(at)] == [5, 13]
    mesh = Mesh.describe(layout, 13)
    assert (mesh.expert.rank, mesh.expert.size, mesh.expert_data.rank, mesh.expert_data.size) == (2, 4, 1, 2)
    assert mesh.expert_tensor == mesh.tensor


def test_folded_axes():
    """The ranks of a stage in their order are one line. Neighbours share the experts (2 stages of 8 ranks)."""
    layout = Layout(tensor=2, data=4, pipeline=2, expert=4, folded=True)
    at = layout.coordinates(13)
    assert at == Coordinates(tensor=1, data=2, pipeline=1)
    assert [layout.rank(each) for each in layout.all_experts(at)] == [12, 13, 14, 15]
    assert [layout.rank(each) for each in layout.same_experts(at)] == [9, 13]
    mesh = Mesh.describe(layout, 13)
    assert (mesh.expert.rank, mesh.expert.size, mesh.expert_data.rank, mesh.expert_data.size) == (1, 4, 1, 2)
    assert mesh.expert_tensor.size == 1
