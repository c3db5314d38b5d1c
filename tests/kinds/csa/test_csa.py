"""Decoding, documents, the indexer's loss by its equations, counts, and tables of experts by token id."""

from __future__ import annotations

import pytest
import torch

from megatron.config import ConfigError, resolve
from megatron.decoding.covered import evaluation_problem
from megatron.decoding.decoder import Decoder, WholeModel
from megatron.decoding.sampling import Sampling
from megatron.decoding.schedule import Request
from megatron.kinds.csa import reading
from megatron.kinds.moe.trace import traced
from megatron.model.costs.describe import layers_table
from megatron.model.stack import build_model
from megatron.model.stream import Stream, token_digits, token_ids
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative

H, S, B = 24, 23, 2
OPTIONS = {
    **{"heads": 4, "head_dim": 8, "query_rank": 10, "rope_dim": 4, "window": 4, "rate": 2, "groups": 2},
    **{"output_rank": 6, "index_heads": 16, "index_dim": 6, "index_top_k": 3},
}
HEAVY = {"rate": 5, "overlap": False, "index_top_k": None}
VARIANTS = {
    "sliding": {"rate": None},
    "heavy": HEAVY,
    "long": {"rate": 32, "overlap": False, "index_top_k": None, "window": 40},
    "two": {"rate": 64, "overlap": False, "index_top_k": None},
    "odd": {"rate": 5},
    "hash": {"router": {"select": "hash"}},
}
EVERY = "csa@sliding/moe@hash csa/moe csa@heavy/moe csa/moe@hash"
MOE = {"experts": 6, "hidden_size": 8, "router": {"score": "sqrt_softplus", "normalize": True}}


def config_of(layers: str = EVERY, documents: bool = False, length: int = S, **options):
    used = {name: own for name, own in VARIANTS.items() if f"@{name}" in layers}
    return resolve({
        "model": {
            **{"layers": layers, "hidden_size": H, "vocab_size": 37, "norm": {"type": "rmsnorm"}, "variants": used},
            **{"csa": {**OPTIONS, **options}, "moe": {**MOE, "losses": {"balance": 0.0}}, "mlp": {"hidden_size": 20}},
        },
        "data": {"reset_attention_at_eod": documents},
        "training": {"steps": 1, "sequence_length": length},
    })


def model_of(config, seed: int = 2):
    model = build_model(config, dtype=DOUBLE)
    randomise(model, seed, std=0.3)
    return model


def tokens_of(length: int = S) -> torch.Tensor:
    return torch.randint(37, (B, length), generator=torch.Generator().manual_seed(1))


def gradients(config, tokens, **extras) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = model_of(config)
    weights = torch.full(tokens.shape, 1.0 / tokens.numel(), dtype=DOUBLE)
    loss, _ = model(tokens, tokens.roll(-1, 1), weights, **extras)
    loss.backward()
    return loss.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named(model).items()}


@pytest.mark.parametrize("pieces", [[23], [1] * 23, [5, 1, 2, 15]])
def test_pieces_equal_the_whole(pieces: list[int]):
    """Also where a piece ends within an entry, and before the first."""
    config = config_of()
    model, tokens = model_of(config).eval(), tokens_of()
    with torch.no_grad():
        wanted, state, begin, found = model.logits(tokens), model.new_state(), 0, []
        for piece in pieces:
            found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    assert relative(torch.cat(found, 1), wanted) < EXACT
    for number, row in enumerate(layers_table(config)[1:5]):
        own = state[number].mixer
        held = 4 * OPTIONS["head_dim"] + sum(each[0].numel() for each in own.recent)  # the window's keys
        if own.entries.keys is not None:
            held += sum(each[0, :, : own.entries.length].numel() for each in (own.entries.keys, own.entries.values))
        assert row["state_bytes"] == 4 * held
        assert row["parameters"] == sum(p.numel() for p in model.blocks[number].parameters())


def test_pages_have_entries_of_any_rate():
    """Entries of two pages and of 5 tokens, where texts have one prompt, and some are read again."""
    model = model_of(config_of("csa@two/mlp csa@odd/mlp", length=96)).eval()
    draw, sampling = torch.Generator().manual_seed(4), Sampling(seed=5)
    prompts = [tuple(torch.randint(37, (length,), generator=draw).tolist()) for length in (66, 31)]
    asked = [Request(prompt, 3, number, sampling) for number, prompt in enumerate([*prompts, prompts[1]])]
    decoder, found = Decoder(WholeModel(model), "cpu", rows=3, budget=70, pages=4), {}
    decoder.logits = lambda live, place, row: found.__setitem__((live.request.number, place), row.clone())
    drawn = decoder.run(asked)
    assert decoder.schedule.preempted and decoder.schedule.reused
    with torch.no_grad():
        for request, one in zip(asked, drawn):
            whole = model.logits(torch.tensor([[*request.prompt, *one.tokens]]))[0]
            places = [place for number, place in found if number == request.number]
            assert places
            for place in places:
                assert relative(found[request.number, place], whole[place]) < EXACT, (request.number, place)


def test_documents_are_read_by_themselves():
    """Entries begin again with each document, whose length need not be a multiple of the rate."""
    config, tokens = config_of(documents=True), tokens_of()
    lengths = ([9, 3, 11], [1, 22])
    numbers = torch.tensor([[n for n, each in enumerate(row) for _ in range(each)] for row in lengths])
    positions = torch.tensor([[place for each in row for place in range(each)] for row in lengths])
    model = model_of(config).eval()
    with torch.no_grad():
        found = model.logits(tokens, documents=numbers, positions=positions)
        for row, each in enumerate(lengths):
            parts = tokens[row].split(each)
            wanted = torch.cat([model.logits(part.unsqueeze(0))[0] for part in parts])
            assert relative(found[row], wanted) < EXACT


def test_runs_of_queries_equal_all_at_once(monkeypatch):
    config, tokens = config_of(), tokens_of()
    whole, expected = gradients(config, tokens)
    monkeypatch.setattr(reading, "ELEMENTS", 500)
    loss, found = gradients(config, tokens)
    assert relative(loss, whole) < EXACT
    for name, gradient in expected.items():
        assert relative(found[name], gradient) < EXACT, name


def equations(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The indexer's loss of a normed input [S, H] without positions, one position, head and entry at a time."""
    r, D, own = OPTIONS["rate"], OPTIONS["head_dim"], OPTIONS["index_dim"]

    def rms(y, name=None):
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return y if name is None else y * weights[name]

    def entries(prefix: str, width: int, x: torch.Tensor) -> list[torch.Tensor]:
        values, gates = (x @ weights[f"{prefix}.project.weight"].T).chunk(2, -1)
        found = []
        for number in range(len(x) // r):
            rows = [(j, slice(width, None)) for j in range(number * r, (number + 1) * r)]
            rows += [(j, slice(width)) for j in range((number - 1) * r, number * r) if j >= 0]
            gate = torch.stack([gates[j, part] + weights[f"{prefix}.bias"][j % r, part] for j, part in rows])
            found.append(
                rms(
                    (torch.stack([values[j, part] for j, part in rows]) * gate.softmax(0)).sum(0),
                    f"{prefix}.norm.weight",
                )
            )
        return found

    low = rms(x @ weights["query_down.weight"].T, "query_norm.weight").detach()
    q = rms((low @ weights["query.weight"].T).unflatten(-1, (-1, D))).detach()
    keys = rms(x @ weights["key.weight"].T, "key_norm.weight").detach()
    compressed = [each.detach() for each in entries("compressor", D, x)]
    index = entries("indexer.compressor", own, x.detach())
    index_q = (low @ weights["indexer.query.weight"].T).unflatten(-1, (-1, own))
    w = x.detach() @ weights["indexer.weigh.weight"].T
    total = torch.zeros((), dtype=DOUBLE)
    for t in range(r - 1, len(x)):
        score = (
            torch.stack([
                sum(w[t, j] * torch.relu(index_q[t, j] @ index[e]) for j in range(len(index_q[t])))
                for e in range((t + 1) // r)
            ])
            * (len(index_q[t]) * own) ** -0.5
        )
        best = sorted(score.topk(min(len(score), OPTIONS["index_top_k"])).indices.tolist())
        near = list(range(max(0, t - OPTIONS["window"] + 1), t + 1))
        target = torch.zeros(len(best), dtype=DOUBLE)
        for head in range(OPTIONS["heads"]):
            read = torch.stack([*(keys[s] for s in near), *(compressed[e] for e in best)])
            logits = torch.cat([read @ q[t, head] * D**-0.5, weights["sinks"][head : head + 1].detach()])
            target += logits.softmax(0)[len(near) : -1]
        target = target / target.sum()
        total = total + (target * (target.log() - score[best].log_softmax(0))).sum()
    return total / len(x)


def test_the_indexer_learns_by_the_equations():
    """Its loss and its gradients. The model's loss does not reach the indexer, nor the indexer's the model."""
    tokens = tokens_of()
    with_loss, found = gradients(config_of("csa/mlp", position="none", index_loss=0.7), tokens)
    without, plain = gradients(config_of("csa/mlp", position="none", index_loss=0.0), tokens)
    model = model_of(config_of("csa/mlp", position="none"))
    weights = {name.removeprefix("layers.0.csa."): p.detach().clone() for name, p in named(model).items()}
    learns = {name: p.requires_grad_() for name, p in weights.items() if name.startswith("indexer.")}
    x = model.embedding.tokens.weight.detach()[tokens]
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights["layers.0.mixer_norm.weight"]
    loss = sum(equations(weights, x[b]) for b in range(B)) / B
    assert relative(with_loss - without, 0.7 * loss.detach()) < 1e-9  # a difference of two losses
    (0.7 * loss).backward()
    for name, p in learns.items():
        assert p.grad.abs().max() > 0 and relative(found[f"layers.0.csa.{name}"], p.grad) < EXACT, name
        assert not plain[f"layers.0.csa.{name}"].any()
    for name, gradient in plain.items():
        if ".indexer." not in name:
            assert relative(found[name], gradient) < EXACT, name


def test_token_ids_choose_experts():
    """Each token has different experts, all experts about equally many tokens, and ids are exact in every type."""
    model = build_model(config_of(), dtype=torch.float32)
    table = model.blocks[0].ffn.table.long()
    assert table.shape == (37, 2) and (table[:, 0] != table[:, 1]).all() and table.min() == 0 and table.max() == 5
    assert not torch.equal(table, model.blocks[3].ffn.table.long())  # each layer has its own
    ids = torch.cat([torch.arange(70_000), torch.tensor([2**24 - 1, 2**20 + 77])]).unsqueeze(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        hidden = torch.zeros(1, 1, dtype=dtype)
        assert torch.equal(token_ids(Stream(hidden, channels={"tokens": token_digits(ids, hidden)})), ids)


@pytest.mark.parametrize(
    ("wrong", "rule", "ranks"),
    [
        ({"parallel": {"context": 2}}, "must be 1 with csa layers, which need all tokens of a sequence on one rank", 2),
        ({"training": {"sequence_chunks": 2}}, "must be 1 with csa layers, which need all tokens at once", 1),
        (
            {"parallel": {"tensor": 4}},
            "each tensor parallel rank must have the same number of the 2 groups of heads",
            4,
        ),
        ({"model": {"csa": {**OPTIONS, "groups": 3}}}, "groups must divide the 4 heads", 1),
        ({"model": {"csa": {**OPTIONS, "rope_dim": 7}}}, "index_dim must have the 7 channels", 1),
    ],
)
def test_what_it_cannot_do_is_refused(wrong, rule: str, ranks: int):
    values = {
        "model": {"layers": "csa/mlp", "hidden_size": H, "vocab_size": 40, "csa": OPTIONS, **wrong.get("model", {})},
        "training": {"steps": 1, "sequence_length": 16, **wrong.get("training", {})},
        "parallel": wrong.get("parallel", {}),
    }
    with pytest.raises(ConfigError) as error:
        resolve(values, ranks=ranks)
    assert rule in str(error.value)


def test_traces_have_the_experts_of_the_table():
    model, tokens = model_of(config_of()), tokens_of()
    found = traced(model, tokens)
    for number in (0, 3):
        experts, weights = found[number]
        assert torch.equal(experts, model.blocks[number].ffn.table[tokens].long())
        assert relative(weights.sum(-1), torch.ones_like(weights[..., 0])) < 1e-6


def test_a_table_has_nothing_to_balance():
    for losses, rule in (({"balance": 0.01}, "losses.balance must be 0"), ({"sequence": 0.01}, "losses.sequence must")):
        with pytest.raises(ConfigError) as error:
            resolve({
                "model": {
                    **{"layers": "attention/moe", "hidden_size": H, "vocab_size": 40, "attention": {"heads": 4}},
                    "moe": {**MOE, **VARIANTS["hash"], "losses": losses},
                },
                "training": {"steps": 1, "sequence_length": 16},
            })
        assert rule in str(error.value)


def test_tokens_with_a_table_do_not_stay_with_their_experts():
    """Their ids are not sent along."""
    config = resolve({
        "model": {
            **{"layers": "attention/moe@hash", "hidden_size": H, "vocab_size": 40, "attention": {"heads": 4}},
            **{"moe": MOE, "variants": {"hash": VARIANTS["hash"]}},
        },
        "training": {"steps": 1, "sequence_length": 16},
    })
    placed = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"placement": "a.json"})})
    assert "ids of tokens would have to move too" in str(evaluation_problem(placed))


@pytest.mark.parametrize(
    ("heads", "keys", "length"), [(64, 128, 65536), (64, 1152, 131072), (64, 32896, 131072), (8, 1, 7)]
)
def test_logits_at_once_are_bounded(heads: int, keys: int, length: int):
    """Also where queries read many more keys together than each of them does, as with a window only."""
    rows = reading.rows_at_once(1, heads, keys, length)
    assert 1 <= rows <= length and heads * rows * (keys + rows) <= max(reading.ELEMENTS, heads * (keys + 1))
    assert rows >= min(length, 31)


def test_further_tokens_have_no_token_ids():
    with pytest.raises(ConfigError) as error:
        resolve({
            "model": {
                **{"layers": "csa/moe@hash", "hidden_size": H, "vocab_size": 40, "csa": OPTIONS, "moe": MOE},
                **{
                    "variants": {"hash": VARIANTS["hash"]},
                    "multi_token_prediction": {"depth": 1, "block": "csa/moe@hash"},
                },
            },
            "training": {"steps": 1, "sequence_length": 16},
        })
    assert "must choose experts by their scores" in str(error.value)
