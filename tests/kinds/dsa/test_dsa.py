"""The indexer's loss against the published equations, what learns by it, decoding and counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.config import ConfigError, resolve
from megatron.kinds.dsa import indexer
from megatron.model.costs.describe import layers_table
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import named, randomise, relative

H, S, B = 24, 14, 2
OPTIONS = {
    **{"heads": 3, "query_rank": 10, "kv_rank": 9, "nope_dim": 6, "rope_dim": 4, "value_dim": 8},
    **{"index_heads": 6, "index_dim": 8, "index_top_k": 5},
}


def config_of(layers: str = "(dsa/mlp) x2", documents: bool = False, kind: str = "dsa", **options):
    own = {**OPTIONS, **options} if kind == "dsa" else {k: v for k, v in OPTIONS.items() if "index" not in k}
    return resolve({
        "model": {"layers": layers, "hidden_size": H, "vocab_size": 37, "norm": {"type": "rmsnorm"}, kind: own},
        "data": {"reset_attention_at_eod": documents},
        "training": {"steps": 1, "sequence_length": S},
    })


def model_of(config, seed: int = 2):
    model = build_model(config, dtype=DOUBLE)
    randomise(model, seed, std=0.3)
    return model


def batch():
    return torch.randint(37, (2, B, S), generator=torch.Generator().manual_seed(1))


def gradients(config, documents=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model, (tokens, labels) = model_of(config), batch()
    weights = torch.full((B, S), 1.0 / (B * S), dtype=DOUBLE)
    loss, _ = model(tokens, labels, weights, documents=documents)
    loss.backward()
    return loss.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named(model).items()}


def equations(weights: dict[str, torch.Tensor], x: torch.Tensor, warm_up: bool, documents) -> torch.Tensor:
    """DeepSeek-V3.2's equations 1 and 4, one sample, position and head at a time, of a normed input [S, H]."""
    n, N, P = OPTIONS["heads"], OPTIONS["nope_dim"], OPTIONS["rope_dim"]
    h, D = OPTIONS["index_heads"], OPTIONS["index_dim"]

    def rms(y, name):
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    low = rms(x @ weights["query_down.weight"].T, "query_norm.weight").detach()
    q = (low @ weights["query.weight"].T).unflatten(-1, (n, P + N)).detach()
    down = x @ weights["kv_down.weight"].T
    latent, turned = rms(down[:, : OPTIONS["kv_rank"]], "kv_norm.weight"), down[:, OPTIONS["kv_rank"] :]
    k = (latent @ weights["key_value.weight"].T).unflatten(-1, (n, -1))[..., :N].detach()
    index_q = (low @ weights["indexer.query.weight"].T).unflatten(-1, (h, D))
    index_k = x.detach() @ weights["indexer.key.weight"].T
    index_k = F.layer_norm(index_k, (D,), weights["indexer.key_norm.weight"], weights["indexer.key_norm.bias"], 1e-6)
    w = x.detach() @ weights["indexer.weigh.weight"].T
    total = torch.zeros((), dtype=DOUBLE)
    for t in range(len(x)):
        seen = [s for s in range(t + 1) if documents is None or documents[s] == documents[t]]
        score = torch.stack([
            sum(w[t, j] * torch.relu(index_q[t, j] @ index_k[s]) for j in range(h)) * (h * D) ** -0.5 for s in seen
        ])
        best = (
            range(len(seen)) if warm_up else sorted(score.topk(min(len(seen), OPTIONS["index_top_k"])).indices.tolist())
        )
        target = torch.zeros(len(best), dtype=DOUBLE)
        for head in range(n):
            keys = torch.stack([torch.cat([turned[seen[s]].detach(), k[seen[s], head]]) for s in best])
            target += ((keys @ q[t, head]) * (N + P) ** -0.5).softmax(0)
        target = target / target.sum()
        total = total + (target * (target.log() - score[best].log_softmax(0))).sum()
    return total / len(x)


@pytest.mark.parametrize("warm_up", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_the_loss_is_that_of_the_equations(warm_up: bool, documents: bool, monkeypatch):
    """Its value, and the indexer's gradients, with several rows of positions at a time and without rotary positions."""
    monkeypatch.setattr(indexer, "ELEMENTS", 100)
    numbers = torch.tensor([[0] * 6 + [1] * 8, [0] * 14]) if documents else None
    options = {"position": "none", "warm_up": warm_up}
    with_loss, found = gradients(config_of("dsa", documents, index_loss=0.7, **options), numbers)
    without, plain = gradients(config_of("dsa", documents, index_loss=0.0, **options), numbers)
    model = model_of(config_of("dsa", documents, index_loss=0.7, **options))
    weights = {name.removeprefix("layers.0.dsa."): p.detach().clone() for name, p in named(model).items()}
    learns = {name: p.requires_grad_() for name, p in weights.items() if name.startswith("indexer.")}
    tokens, _ = batch()
    x = model.embedding.tokens.weight.detach()[tokens]
    x = x / (x.square().mean(-1, keepdim=True) + model.plan.config.model.norm.epsilon).sqrt()
    x = x * weights["layers.0.mixer_norm.weight"]
    loss = sum(equations(weights, x[b], warm_up, None if numbers is None else numbers[b]) for b in range(B)) / B
    assert relative(with_loss - without, 0.7 * loss.detach()) < 1e-9  # a difference of two losses
    (0.7 * loss).backward()
    for name, p in learns.items():
        assert p.grad.abs().max() > 0 and relative(found[f"layers.0.dsa.{name}"], p.grad) < EXACT, name
        assert not plain[f"layers.0.dsa.{name}"].any()  # the model's loss does not reach the indexer
    for name, gradient in plain.items():
        if ".indexer." not in name:  # and the indexer's not the model
            assert relative(found[name], gradient) < EXACT, name


def test_warm_up_computes_latent_attention():
    """The logits of mla with the same weights."""
    one, other = model_of(config_of(warm_up=True)), model_of(config_of("(mla/mlp) x2", kind="mla"))
    ours = named(one)
    with torch.no_grad():
        for name, p in named(other).items():
            p.copy_(ours[name.replace(".mla.", ".dsa.")])
    tokens, _ = batch()
    assert relative(one.eval().logits(tokens), other.eval().logits(tokens)) < EXACT


@pytest.mark.parametrize("pieces", [[14], [1] * 14, [5, 1, 1, 7]])
def test_pieces_equal_the_whole(pieces: list[int]):
    config = config_of()
    model, (tokens, _) = model_of(config).eval(), batch()
    with torch.no_grad():
        wanted, state, begin, found = model.logits(tokens), model.new_state(), 0, []
        for piece in pieces:
            found.append(model.decode(tokens[:, begin : begin + piece], state, begin))
            begin += piece
    assert relative(torch.cat(found, 1), wanted) < EXACT
    row, own = layers_table(config)[1], state[0].mixer
    held = sum(each[0, :, :S].numel() for each in (own.latents.keys, own.latents.values, own.index.keys))
    assert row["state_bytes"] == 4 * held
    assert row["parameters"] == sum(p.numel() for p in model.blocks[0].parameters())


@pytest.mark.parametrize(
    ("wrong", "rule", "ranks"),
    [
        ({"parallel": {"context": 2}}, "must be 1 with dsa layers, which need all tokens of a sequence on one rank", 2),
        ({"training": {"sequence_chunks": 2}}, "must be 1 with dsa layers, which need all tokens at once", 1),
    ],
)
def test_parts_of_sequences_are_refused(wrong, rule: str, ranks: int):
    values = {
        "model": {"layers": "dsa/mlp", "hidden_size": H, "vocab_size": 37, "dsa": OPTIONS},
        "training": {"steps": 1, "sequence_length": 16, **wrong.get("training", {})},
        "parallel": wrong.get("parallel", {}),
    }
    with pytest.raises(ConfigError) as error:
        resolve(values, ranks=ranks)
    assert rule in str(error.value)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError) as error:
        config_of(dropout=0.1, index_dim=2)
    assert "must be 0: the indexer learns" in str(error.value) and "index_dim must be at least 4" in str(error.value)
