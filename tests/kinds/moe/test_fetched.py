"""Experts outside of the device: the same bits as with all of them there, whatever is predicted and held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import resolve
from megatron.decoding.decoder import Decoder, WholeModel
from megatron.decoding.schedule import Request
from megatron.kinds.moe.fetched import Fetching
from megatron.kinds.moe.router import ExpertChoice
from megatron.kinds.moe.trace import moe_layers
from megatron.model.stack import Model, build_model
from megatron.training.text import main
from tests.eval_tasks.models import write_checkpoint
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import relative

EXPERTS, LAYERS = 8, 3
FORMS: dict[str, dict[str, Any]] = {
    "softmax": {"router": {"normalize": True}},
    "biases, shared": {"bias": True, "shared_size": 16, "gated": False},
    "groups, none": {"router": {"score": "sigmoid", "groups": 4, "top_groups": 3, "correction": "sign"}},
    "latent": {"latent_size": 16, "top_k": 3},
}


def model_of(dtype: torch.dtype = torch.float32, form: str = "softmax", change: dict[str, Any] | None = None) -> Model:
    moe = {"experts": EXPERTS, "top_k": 2, "hidden_size": 24, **FORMS[form]}
    model = {"layers": f"attention/mlp (attention/moe) x{LAYERS}", "hidden_size": 32, "vocab_size": 61}
    attention = {"attention": {"heads": 4, "kv_heads": 2}, "norm": {"type": "rmsnorm"}}
    config = resolve({
        "model": {**model, **attention, "moe": moe, **(change or {})},
        "training": {"steps": 1, "sequence_length": 64},
    })
    made, draw = build_model(config, dtype=dtype).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += (0.2 * torch.randn(parameter.shape, generator=draw, dtype=DOUBLE)).to(parameter.dtype)
    return made


def requests() -> list[Request]:
    draw = torch.Generator().manual_seed(1)
    return [Request(tuple(torch.randint(60, (n,), generator=draw).tolist()), 6, n) for n in (3, 37, 1, 20)]


def answers(model: Model, asked: list[Request]) -> dict[tuple[int, int], Tensor]:
    """The logits of each request and position."""
    decoder, logits = Decoder(WholeModel(model), "cpu", rows=3), {}
    decoder.logits = lambda live, place, row: logits.__setitem__((live.request.number, place), row.clone())
    decoder.run(asked)
    return logits


def same(found: dict, wanted: dict) -> bool:
    return found.keys() == wanted.keys() and all(row.equal(wanted[key]) for key, row in found.items())


@pytest.mark.parametrize("form", FORMS)
def test_no_bit_depends_on_what_is_held_or_predicted(form: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        wanted = answers(model_of(dtype, form), requests())
        for held, wrong in ((1, False), (3, False), (3, True), (EXPERTS, False)):
            model = model_of(dtype, form)
            fetching = Fetching(model, held)
            if wrong:  # predictions that have nothing to do with the text
                for layer in fetching.layers:
                    layer.mean_H = 100 * torch.randn(32)
            else:
                fetching.calibrate(model, torch.arange(40).view(2, 20))
            assert same(answers(model, requests()), wanted), (form, dtype, held)
            assert all(len(layer.held.slots) <= held for layer in fetching.layers)
            assert all(len(place) <= held for layer in fetching.layers for _, place in layer.held.pairs)


def test_mean_outputs_of_layers() -> None:
    model, plain, tokens = model_of(DOUBLE), model_of(DOUBLE), torch.arange(40).view(2, 20)
    fetching, outputs = Fetching(model, 3, speculate=True), list[Tensor]()
    fetching.calibrate(model, tokens)
    for moe in moe_layers(plain).values():
        moe.register_forward_hook(lambda *both: outputs.append(both[-1][0]))  # and channels
    with torch.no_grad():
        plain.logits(tokens)
    for layer, output in zip(fetching.layers, outputs, strict=True):
        assert relative(torch.as_tensor(layer.mean_H), output.mean((0, 1))) < EXACT
        assert layer.choices == layer.held.copies == 0, "of the decoder's texts only"


class SimpleCache:
    """The least recently used expert leaves, by a list."""

    def __init__(self, places: int) -> None:
        self.places, self.order, self.copies = places, list[int](), 0

    def hold(self, wanted: list[int]) -> None:
        for each in wanted:
            if each in self.order:
                self.order.remove(each)
            else:
                self.copies += 1
                if len(self.order) == self.places:
                    self.order.remove(next(old for old in self.order if old not in wanted))
            self.order.append(each)


def test_copies_are_those_of_a_simple_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for held in (2, 3, EXPERTS):
        model = model_of()
        fetching, simple = Fetching(model, held), [SimpleCache(held) for _ in range(LAYERS)]
        seen: list[set[int]] = [set() for _ in range(LAYERS)]
        for layer, cache, experts in zip(fetching.layers, simple, seen):
            plain = layer.held.hold

            def hold(wanted: Any, plain: Any = plain, cache: Any = cache, experts: Any = experts) -> None:
                plain(wanted)
                cache.hold(list(wanted))
                experts.update(wanted)

            monkeypatch.setattr(layer.held, "hold", hold)
        answers(model, requests())
        for layer, cache, experts in zip(fetching.layers, simple, seen):
            assert layer.held.copies == cache.copies and list(layer.held.slots) == cache.order
            assert layer.held.expert_bytes == 3 * 32 * 24 * 4, "gate, up and down in fp32"
            assert held < EXPERTS or layer.held.copies == len(experts), "each expert once"
            assert 0 < layer.held.there <= layer.held.used
        assert "were on the device" in fetching.report() and "were predicted" in fetching.report()


def test_prediction_is_right_where_nothing_lies_between() -> None:
    """Attention and experts that add nothing: the next router reads the state at hand itself."""
    model = model_of(change={"layers": f"(attention/moe) x{LAYERS}"})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down" in name or "mixer.output" in name or ".out." in name or "proj" in name:
                parameter.zero_()
    fetching = Fetching(model, 4)
    answers(model, requests())
    assert [layer.choices for layer in fetching.layers][0] == 0
    for layer in fetching.layers[1:]:
        assert layer.right == layer.choices > 0


def guesses(fetching: Fetching) -> list[list[Tensor]]:
    """The experts that each layer uses, by pass, without padding."""
    found: list[list[Tensor]] = []
    for layer in fetching.layers:
        own, mine = layer.moe.choose, list[Tensor]()

        def choose(*scores: Tensor, own: Any = own, mine: list[Tensor] = mine) -> ExpertChoice:
            choice = own(*scores)
            mine.append(choice.of_tokens[: fetching.real].clone())
            return choice

        layer.moe.choose = choose
        found.append(mine)
    return found


def test_guessed_experts_are_the_model_with_that_routing() -> None:
    """In float64: whole text through the plain model, whose choices are replaced by the recorded ones."""
    asked, plain = Request(tuple(range(5, 28)), 6, 0), model_of(DOUBLE)
    model = model_of(DOUBLE)
    fetching = Fetching(model, 3, speculate=True)
    used = guesses(fetching)
    decoder, logits = Decoder(WholeModel(model), "cpu"), {}
    decoder.logits = lambda live, place, row: logits.__setitem__(place, row.clone())
    (drawn,) = decoder.run([asked])
    text = torch.tensor([[*asked.prompt, *drawn.tokens]])
    with torch.no_grad():
        resident = plain.logits(text)[0]
        for layer, mine in zip(moe_layers(plain).values(), used):
            chosen = torch.cat(mine)
            missing = chosen[-1:].expand(text.shape[1] - len(chosen), -1)  # the last token is not read
            layer.choose = lambda *_, chosen=chosen, missing=missing: ExpertChoice(torch.cat([chosen, missing]))
        whole = plain.logits(text)[0]
    for place, row in logits.items():
        assert relative(row, whole[place]) < EXACT
    assert max(relative(row, resident[place]) for place, row in logits.items()) > 1e-3, "it is an approximation"
    assert all(layer.right < layer.choices for layer in fetching.layers[1:])


def test_guessed_experts_do_not_depend_on_the_company() -> None:
    model = model_of()
    Fetching(model, 3, speculate=True)
    together = answers(model, requests())
    alone = [answers(model, [each]) for each in requests()]
    assert same({key: row for each in alone for key, row in each.items()}, together)


def test_generate_with_experts_in_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_checkpoint("mixtral", tmp_path)
    words = [
        str(path),
        "--prompt",
        "the sum",
        "--prompt",
        "Return the value",
        "--tokens",
        "6",
        "--device",
        "cpu",
        "--json",
    ]
    assert main(words) == 0
    wanted = capsys.readouterr().out
    held = [*words, "--experts-held", "2", "--experts-folder", str(tmp_path)]
    assert main(held) == 0
    found = capsys.readouterr()
    assert found.out == wanted and "were on the device when a pass came to them" in found.err
    assert main([*held, "--experts-guessed"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert not list(tmp_path.glob("tmp*")), "files have no names"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--experts-held", "0"], "--experts-held is 0: it must be at least 1"),
        (["--experts-guessed"], "--experts-folder and --experts-guessed need --experts-held"),
        (["--experts-held", "2", "--no-cache"], "must be without --no-cache"),
        (["--experts-held", "2", "--experts-folder", "nowhere"], "must be a folder that exists: nowhere"),
        (["--experts-held", "2"], "model.layers must have layers with experts"),
    ],
)
def test_refusals(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write_checkpoint("gpt_neox", tmp_path)
    assert main([str(path), "--prompt", "a", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
