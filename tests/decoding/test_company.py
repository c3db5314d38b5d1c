"""A request's tokens, logits and log-probabilities: the same bits in any company and pieces, as of whole texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron import api
from megatron.config import resolve
from megatron.decoding.covered import obstacle
from megatron.decoding.decoder import Decoder, WholeModel, next_tokens
from megatron.decoding.sampling import GREEDY, Sampling
from megatron.decoding.schedule import Drawn, Request
from megatron.kinds.common.attention import paged_keys
from megatron.model.stack import Model, build_model
from megatron.parallel.layers.cross_entropy import LossOptions
from megatron.parallel.layers.label_costs import token_scores
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import relative
from tests.selection import toured

# Windows and sinks. Latents. Compressed keys with convolutions. Shared blocks and a scan. Attention next to a scan. Two
# recurrences of matrices. Delta rule. Experts by sigmoid and by softmax. Latents that an indexer chooses. Compressed
# entries. ALiBi, caps and learned positions. Keys of earlier layers and inputs of tokens.
NAMES = ["gpt_oss", "deepseek_v2", "zaya", "zamba2", "falcon_h1", "rwkv7_hybrid", "gated_delta", "mixtral"]
NAMES += ["rwkv4", "rwkv5", "rwkv6", "jamba", "deepseek_v32", "deepseek_v4"]
OTHERS: dict[str, dict[str, Any]] = {
    "learned": {
        "embedding": {"position": "learned", "max_positions": 128},
        "attention": {"heads": 4, "position": "none"},
    },
    "caps": {"attention": {"heads": 4, "kv_heads": 2, "position": "alibi", "softcap": 3.0, "window": 20}},
    "depth": {
        "layers": "attention/mlp recurrent(attention/mlp mamba2/mlp) attention/mlp",
        "attention": {"heads": 4},
        "mamba2": {"head_dim": 16, "state_size": 16},
        "recurrence": {"evaluation": 2},
    },
    "rows": {"attention": {"heads": 4, "gate": "channel"}, "residual": {"streams": 3}},
    "earlier keys": {
        "layers": "attention/mlp attention@near/mlp attention@near_last/mlp attention@last/mlp",
        "attention": {"heads": 4, "kv_heads": 2},
        "residual": {"token_inputs": 8},
        "variants": {
            "near": {"window": 20},
            "near_last": {"window": 20, "keys": "earlier"},
            "last": {"keys": "earlier"},
        },
    },
}
WAYS: list[dict[str, Any]] = [{"rows": 3, "budget": 17}, {"pages": 5}]


def model_of(name: str, dtype: torch.dtype) -> Model:
    config = None if name in OTHERS else api.resolve(f"test/tiny_{name}").config
    if config is None:
        plain = {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 61, "norm": {"type": "rmsnorm"}}
        given = {"model": {**plain, **OTHERS[name]}, "training": {"steps": 1, "sequence_length": 128}}
        config = resolve(given)
    assert obstacle(config) is None
    model, draw = build_model(config, dtype=dtype).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.1 * torch.randn(parameter.shape, generator=draw, dtype=DOUBLE)).to(parameter.dtype)
    return model


def requests() -> list[Request]:
    """Texts on both sides of pages' ends, some with one beginning, some of one prompt."""
    draw, sampling = torch.Generator().manual_seed(1), Sampling(0.8, top_k=20, top_p=0.95, seed=5)
    prompts = [tuple(torch.randint(60, (length,), generator=draw).tolist()) for length in (3, 37, 41, 1, 30)]
    prompts += [(*prompts[2][:34], 7), prompts[1], prompts[1]]
    return [Request(prompt, 5 - number % 2, number, sampling) for number, prompt in enumerate(prompts)]


def answers(model: Model, asked: Sequence[Request], **how: Any) -> tuple[list[Drawn], dict, Decoder]:
    decoder, logits = Decoder(WholeModel(model), "cpu", **how), {}
    decoder.logits = lambda live, place, row: logits.__setitem__((live.request.number, place), row.clone())
    return decoder.run(asked), logits, decoder


@pytest.mark.parametrize("name", toured([*NAMES, *OTHERS], "layouts"))
def test_logits_are_those_of_whole_texts(name: str) -> None:
    """In float64, where whole texts differ by rounding only. Scores of prompts, too."""
    model = model_of(name, DOUBLE)
    asked = [*requests()[1:4], Request(requests()[2].prompt, 0, 11, scored=20)]
    drawn, logits, decoder = answers(model, asked, rows=3, budget=30)
    for request, found in zip(asked, drawn):
        text = [*request.prompt, *found.tokens]
        with torch.no_grad():
            whole = model.logits(torch.tensor([text]))[0]
        places = [place for number, place in logits if number == request.number]
        assert len(places) == request.tokens + request.scored == len(found.tokens) + len(found.scores)
        for place in places:
            assert relative(logits[request.number, place], whole[place]) < EXACT
        logs = whole.double().log_softmax(-1)
        begin = len(request.prompt) - 1 - request.scored
        wanted = [float(logs[place, text[place + 1]]) for place in range(begin, len(text) - 1)]
        assert [*found.scores, *found.log_p] == pytest.approx(wanted, abs=1e-9)
    assert not decoder.schedule.running


@pytest.mark.parametrize("most", [128, 64])
def test_a_text_as_long_as_the_model_reads_is_scored(most: int) -> None:
    """The token after the last position is scored, and not read. Other texts begin with its pages."""
    model = model_of("learned", DOUBLE)
    text = tuple(torch.randint(60, (most + 1,), generator=torch.Generator().manual_seed(2)).tolist())
    asked = [Request(text, 0, scored=most), Request(text, 0, 1, scored=3), Request(text[:-1], 1, 2)]
    drawn, _, decoder = answers(model, asked, rows=2, budget=50)
    with torch.no_grad():
        logs = model.logits(torch.tensor([text[:-1]]))[0].log_softmax(-1)
    wanted = [float(row[token]) for row, token in zip(logs, text[1:])]
    assert [*drawn[0].scores, *drawn[1].scores] == pytest.approx([*wanted, *wanted[-3:]], abs=1e-9)
    assert drawn[2].tokens == [int(logs[-1].argmax())] and decoder.schedule.reused


def test_log_probabilities_are_the_trainers() -> None:
    """By the same operations: equal logits have equal log-probabilities, of tokens and of scored prompts."""
    model = model_of("mixtral", torch.float32)
    asked = [Request((1, 2, 3, 4, 5), 4, scored=3), Request((7, 8), 3, 1)]
    drawn, logits, _ = answers(model, asked)
    for request, found in zip(asked, drawn):
        text = [*request.prompt, *found.tokens]
        places = range(len(request.prompt) - 1 - request.scored, len(text) - 1)
        rows = torch.stack([logits[request.number, place] for place in places])
        labels = torch.tensor(text[places.start + 1 :])
        logs, _ = token_scores(rows, torch.eye(rows.shape[1]), None, labels, options=LossOptions())
        assert [*found.scores, *found.log_p] == logs.tolist()


OFTEN = ("gpt_oss", "deepseek_v2", "falcon_h1")  # in bf16
CASES = [
    *((name, torch.float32) for name in (*NAMES, *OTHERS)),
    *(
        pytest.param(name, torch.bfloat16, marks=[] if name in OFTEN else pytest.mark.slow)
        for name in (*NAMES, *OTHERS)
    ),
]


@pytest.mark.parametrize(
    ("name", "dtype"), toured(CASES, "layouts"), ids=lambda value: str(value).removeprefix("torch.")
)
def test_company_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    model, asked = model_of(name, dtype), requests()
    single = [answers(model, [each]) for each in asked]
    alone = [drawn for (drawn,), *_ in single]
    wanted = {key: row for _, logits, _ in single for key, row in logits.items()}
    pairs = list(zip(asked, alone))[1:4]  # texts that are scored have the log-probabilities with which they were drawn
    scored = [Request((*each.prompt, *own.tokens), 0, 100, scored=len(own.tokens)) for each, own in pairs]
    counts = Counter[str]()
    for way, how in enumerate(WAYS):
        order = asked[::-1] if way else [*asked, *scored]
        drawn, logits, decoder = answers(model, order, **how)
        assert (drawn[::-1] if way else drawn[: len(asked)]) == alone
        assert all(row.equal(wanted[key]) for key, row in logits.items() if key[0] < 100)
        assert way or [each.scores for each in drawn[len(asked) :]] == [own.log_p for _, own in pairs]
        counts.update(reused=decoder.schedule.reused, preempted=decoder.schedule.preempted)
    assert counts["reused"] > 0 and counts["preempted"] > 0


def test_it_is_the_rows_that_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding kernels of few rows are used, and company changes bits. The test above would find it."""
    monkeypatch.setattr(paged_keys, "PADDED", 1)
    monkeypatch.setattr(paged_keys, "FEWEST", 1)
    model, asked = model_of("mixtral", torch.float32), requests()
    _, together, _ = answers(model, asked)
    apart = [row.equal(together[key]) for each in asked[:4] for key, row in answers(model, [each])[1].items()]
    if all(apart):
        pytest.skip("this processor's kernels round few rows like many")


def test_company_that_diverges() -> None:
    """NaNs of one text reach no other, and none that uses its pages later."""
    model = model_of("gated_delta", torch.float32)
    good = requests()[:3]
    with torch.no_grad():
        model.embedding.tokens.weight[60] = float("nan")
    bad = [Request((60,) * 40, 5, 20), Request((1, 60), 5, 21)]
    alone = [answers(model, [each])[0][0] for each in good]
    drawn, _, _ = answers(model, [bad[0], good[0], bad[1], *good[1:]], rows=2, pages=4)
    assert [drawn[1], *drawn[3:]] == alone


def test_memory_follows_the_texts() -> None:
    """Not the lengths that they may reach."""
    model = model_of("caps", torch.float32)
    _, _, decoder = answers(model, [Request((1, 2, 3), 100_000, finished=lambda ids: len(ids) == 2)])
    assert decoder.schedule.pool.pages == 3126
    assert all(each.keys is not None and len(each.keys) == 2 for each in decoder.states.keys)


def test_lengths_and_ends() -> None:
    model = model_of("caps", torch.float32)
    free = answers(model, [Request((1, 2, 3), 12)])[0][0]
    end, stop = free.tokens[4], free.tokens[2]
    first = free.tokens.index(end)
    drawn = answers(
        model,
        [
            Request((1, 2, 3), 12, end=end),
            Request((1, 2, 3), 12, finished=lambda ids: ids[-1] == stop),
            Request((1, 2, 3), 8, end=end, least=8),
        ],
    )[0]
    assert drawn[0].tokens == free.tokens[: first + 1] and drawn[0].ended
    assert drawn[1].tokens == free.tokens[: free.tokens.index(stop) + 1] and drawn[1].ended
    scored = [Request((1, 2, 3), tokens, scored=2) for tokens in (0, 2, 0, 2)]
    only, *others = answers(model, scored)[0]
    assert [len(each.tokens) for each in others] == [2, 0, 2] and all(each.scores == only.scores for each in others)
    assert len(drawn[2].tokens) == 8 and end not in drawn[2].tokens[:7]
    assert GREEDY.temperature == 0.0 and not free.ended


def test_log_probabilities_are_the_models_where_no_end_is_chosen() -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    end = int(logits.argmax())
    (token,), (log,) = next_tokens([(Request((1,), 4, end=end, least=2), Drawn())], logits)
    assert token != end and int(logits.argmax()) == end
    assert log == pytest.approx(float(logits.log_softmax(-1)[0, token]), abs=1e-12)
    last = [int(each) for each in logits.argsort(-1)[0]]
    several = Request((1,), 4, end=end, least=2, further_ends=frozenset({*last[1:], 99}))
    assert next_tokens([(several, Drawn([last[0]]))], logits)[0] == [last[0]]
    assert next_tokens([(several, Drawn([last[0]] * 2))], logits)[0] == [end]
