"""Scores and continuations on layouts, against one process that reads each text by itself, without padding."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megatron.config import resolve
from megatron.decoding.one_text import complete
from megatron.decoding.read_less import calibrate, write
from megatron.decoding.sampling import Sampling
from megatron.decoding.schedule import Request
from megatron.evaluation.scoring import Scorer, Text, depends_on_batch
from megatron.model.stack import Model, build_model
from megatron.parallel.layers.parameters import buffers_of, stored_tensors
from tests.selection import toured
from tests.training import matrix, runs
from tests.workers import run

MATRIX = matrix.read()
LENGTHS = (2, 14, 5, 9, 13, 3, 12, 9, 8, 2, 7)
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.7, seed=5)
# Of each layout: architectures that every `make test` scores on it, and the others. Each of them is scored on two axes.
LAYOUTS = {
    "tp2, sequence parallel": (("zamba2",), ("neox", "documents", "gpt2", "state space", "rwkv7", "moe")),
    "pp2": (("rwkv7",), ("moe", "neox", "state space", "zamba2")),
    "dp2, ZeRO 3, one micro-batch": (("neox",), ("zamba2", "state space", "rwkv7", "moe")),
    "tp2 · pp2 · dp2, ZeRO 0": (("llama",), ("state space", "rwkv7", "zamba2")),
    "tp2 · dp2 · ep2, ZeRO 0": (("moe",), ()),
    "tp2 · dp2, ZeRO 1": (("rwkv7",), ("state space", "zamba2", "gpt2")),
    "tp2 · cp2, ZeRO 1, sequence parallel": (("documents", "state space"), ("rwkv7", "gpt2")),
    "fold2, ZeRO 0": (("even vocabulary",), ("state space",)),
    "fold4 by ring, ZeRO 2": ((), ("documents",)),
    "cp2, chunks": ((), ("state space", "documents")),
    "pp2 · dp2, ZB-V, ZeRO 3 gathered once": (("moe",), ("rwkv7",)),
    "cp2 · pp2, two stages per rank, zero bubble": ((), ("state space", "neox")),
}
PAIRS = [
    *((name, layout) for layout, (often, _) in LAYOUTS.items() for name in often),
    *(pytest.param(name, layout, marks=pytest.mark.slow) for layout, (_, rest) in LAYOUTS.items() for name in rest),
]


def texts(vocabulary: int) -> list[Text]:
    draw = torch.Generator().manual_seed(3)
    made = [
        Text(tuple(torch.randint(0, vocabulary, (length,), generator=draw).tolist()), 1 + length // 3)
        for length in LENGTHS
    ]
    choices = [Text((*made[4].tokens[:-1], token), 1) for token in (1, 7, 1)]  # one context, three endings
    context, ends = made[1].tokens[:9], ((5, 3, 9), (5, 3, 4), (5, 8), (2,), (2, 6, 1, 7), (5, 3, 9))
    endings = [Text((*context, *end), len(end)) for end in ends]  # one context, endings of several tokens
    others = [Text((*made[8].tokens[:size], 4, 2), 2) for size in (7, 7, 6)]
    others += [Text((*made[8].tokens[:7], 3, 2, 1), 3), Text((*made[3].tokens[:7], 3, 2), 2)]
    return [*made, *choices, *endings, *others, Text((*made[3].tokens[:7], 1, 2), 2)]


def prompts(vocabulary: int) -> list[tuple[int, ...]]:
    return [text.tokens[:9] for text in texts(vocabulary)[:6]]


def settings_of(architecture: str, layout: str) -> tuple[dict, int]:
    own = {k: v for k, v in MATRIX["architectures"][architecture].items() if k not in ("about", "apart")}
    cut = {k: v for k, v in MATRIX["layouts"][layout].items() if k != "ranks"}
    return matrix.merged(MATRIX["common"], own, cut), MATRIX["layouts"][layout]["ranks"]


def on_layout(settings: dict, ranks: int):
    """Scores and continuations, and the loss of a training step before and after them."""
    config, engine = runs.start(settings, ranks)
    scorer = Scorer(config, engine, engine.mesh, engine.device, texts=3)
    V = config.model.vocab_size
    found = [(score.log_likelihood, score.greedy) for score in scorer.score(texts(V))]
    exact = Scorer(config, engine, engine.mesh, engine.device, texts=3, exact=True)
    some = [4, 1, 11, 12, 14, 15]  # with common beginnings
    together = exact.score([texts(V)[at] for at in some])
    assert exact.score([texts(V)[4]]) == together[:1], "a score depends on other texts"
    for one, other in zip(together, [found[at] for at in some], strict=True):
        assert abs(one.log_likelihood - other[0]) < 1e-4 and one.greedy == other[1]
    asked = [Request(prompt, 5, n, SAMPLED, lambda tokens: len(tokens) == 4) for n, prompt in enumerate(prompts(V))]
    sampled = [each.tokens for each in scorer.answer(asked)]
    assert scorer.cached
    greedy = [(each.tokens, each.log_p) for each in scorer.answer([Request(prompt, 3) for prompt in prompts(V)])]
    return found, sampled, greedy, runs.steps(config, engine, 0, 2)


def untouched(settings: dict, ranks: int):
    """The losses of the same steps where nothing was scored."""
    config, engine = runs.start(settings, ranks)
    return runs.steps(config, engine, 0, 2)


def plain_model(settings: dict) -> Model:
    model = build_model(resolve(settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in {id(each): each for each in [*stored_tensors(model), *buffers_of(model)]}.values():
            tensor.add_(torch.from_numpy(runs.noise(tensor.logical)).to(tensor.dtype))
    return model


@torch.no_grad()
def alone(model: Model, text: Text) -> tuple[float, bool]:
    """By the softmax of whole logits in float64, of one text."""
    logs = model.logits(torch.tensor([text.inputs]))[0].double().log_softmax(-1)[-text.scored :]
    targets = torch.tensor(text.targets)
    return float(logs.gather(1, targets.unsqueeze(1)).sum()), bool((logs.argmax(-1) == targets).all())


@cache
def scored(architecture: str, layout: str) -> list:
    """Results of `on_layout` on each rank."""
    settings, ranks = settings_of(architecture, layout)
    return run(ranks, on_layout, settings, ranks)


@pytest.mark.parametrize(("architecture", "layout"), toured(PAIRS, "layouts"), ids=lambda word: word.replace(" ", "-"))
def test_scores_are_those_of_one_process(architecture, layout):
    check(settings_of(architecture, layout)[0], scored(architecture, layout))


def test_positions_that_ranks_cannot_share_evenly_are_left():
    """Of 18 learned positions two ranks have 9 each, and with a zigzag cut that is no two equal runs."""
    settings, ranks = settings_of("gpt2", "cp2 by ring, ZeRO 0")
    settings = matrix.merged(settings, {"model": {"embedding": {"max_positions": 18}}})
    check(settings, run(ranks, on_layout, settings, ranks))


def check(settings: dict, results: list) -> None:
    plain = {k: v for k, v in settings.items() if k not in ("parallel", "zero")}
    model = plain_model(plain)
    V = model.plan.config.model.vocab_size
    assert all(each == results[0] for each in results[1:]), "ranks disagree"
    found, sampled, greedy, _ = results[0]
    for (log_likelihood, is_greedy), text in zip(found, texts(V), strict=True):
        expected, likeliest = alone(model, text)
        assert log_likelihood == pytest.approx(expected, abs=1e-4)
        assert is_greedy == likeliest
    for number, prompt in enumerate(prompts(V)):
        tokens, logs = greedy[number]
        assert tokens == list(complete(model, prompt, 3, GREEDY))
        assert sum(logs) == pytest.approx(alone(model, Text((*prompt, *tokens), 3))[0], abs=1e-4)
        assert len(sampled[number]) == 4


def reading_less(settings: dict, ranks: int):
    config, engine = runs.start(settings, ranks)
    scorer = Scorer.of_tasks(config, engine, engine.mesh, engine.device, 3)
    V = config.model.vocab_size
    made = scorer.answer([Request(prompt, 5) for prompt in prompts(V)])
    return [each.log_likelihood for each in scorer.score(texts(V))], [each.tokens for each in made]


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("way", [{"loki": "my.loki", "rank": 2, "keys": 0.1}, {"sift": 0.6, "warmup": 2}])
def test_tensor_ranks_read_less_as_one_process_does(tmp_path, way, heads):
    """Each rank has the components of its key/value heads, also where both have one head."""
    settings, ranks = settings_of("llama", "tp2 · dp2, ZeRO 1")
    settings = matrix.merged(settings, {"model": {"attention": {"kv_heads": heads}}, "evaluation": {"read_less": way}})
    alone_settings = {k: v for k, v in settings.items() if k not in ("parallel", "zero")}
    if "loki" in way:
        path = tmp_path / "my.loki"
        model = plain_model(alone_settings)
        write(path, calibrate(model, [each.tokens for each in texts(model.plan.config.model.vocab_size)]))
        for each in (settings, alone_settings):
            each["evaluation"]["read_less"]["loki"] = str(path)
    (wanted, words), *_ = run(1, reading_less, alone_settings, 1)
    full = run(1, reading_less, {**alone_settings, "evaluation": {"exact": True}}, 1)[0][0]
    assert max(abs(one - other) for one, other in zip(wanted, full)) > 1e-3, "all was read"
    for scores, tokens in run(ranks, reading_less, settings, ranks):
        assert scores == pytest.approx(wanted, abs=1e-4) and tokens == words


@pytest.mark.parametrize("layout", toured(["pp2", "dp2, ZeRO 3, one micro-batch", "tp2, sequence parallel"], "layouts"))
def test_training_goes_on_as_if_nothing_had_been_scored(layout):
    settings, ranks = settings_of("neox", layout)
    assert [each[3] for each in scored("neox", layout)] == run(ranks, untouched, settings, ranks)


def test_draws_depend_on_the_prompt_alone():
    settings, _ = settings_of("neox", "one, ZeRO 0")
    model = plain_model({k: v for k, v in settings.items() if k not in ("parallel", "zero")})
    V = model.plan.config.model.vocab_size
    layouts = ["one, ZeRO 0", "dp2, ZeRO 0", "pp2"]
    made = [scored("neox", layout)[0][1] for layout in layouts]
    assert made[0] == made[1] == made[2]
    assert made[0][0] == list(complete(model, prompts(V)[0], 4, SAMPLED))  # the first prompt's number is 0


def test_texts_that_see_each_other_are_read_alone():
    base, _ = settings_of("moe", "one, ZeRO 0")
    free = resolve(base)
    assert not depends_on_batch(free)
    capped = matrix.merged(base, {"model": {"moe": {"capacity_factor": 1.0}}})
    assert depends_on_batch(resolve(capped))


def test_a_text_needs_something_before_its_first_scored_token():
    with pytest.raises(ValueError, match="one must stand before"):
        Text((1, 2), 2)
