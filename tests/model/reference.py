"""A dense transformer in float64, written from the formulas, one sample and one head at a time, with no layer of ours.

It reads the same options and the same named weights. Rotary is complex multiplication, attention a loop over heads
and queries, the loss the plain definition.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.variants import options_of


class Reference:
    """The model of a config with these (float64) weights, and numbers that are not trained, by logical name."""

    def __init__(self, config: Config, weights: dict[str, Tensor], fixed: dict[str, Tensor] | None = None):
        self.config, self.model, self.weights, self.fixed = config, config.model, weights, fixed or {}

    def get(self, name: str) -> Tensor | None:
        return self.weights.get(name)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = torch.einsum("si,oi->so", x, self.weights[f"{name}.weight"])
        bias = self.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, x: Tensor, name: str, kind: str | None = None) -> Tensor:
        kind, epsilon = kind or self.model.norm.type, self.model.norm.epsilon
        if kind != "rmsnorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
        weight, bias = self.get(f"{name}.weight"), self.get(f"{name}.bias")
        x = x if weight is None else x * weight
        return x if bias is None else x + bias

    def logits(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """[S] ids to [S, V]. `documents` are numbers of each token's document."""
        places = list(range(len(tokens)))
        if documents is not None:
            places = [place - documents.tolist().index(documents[place]) for place in places]
        x = self.weights["embedding.tokens.weight"][tokens] * self.model.embedding.multiplier
        if self.model.embedding.position == "learned":
            x = x + self.weights["embedding.positions.weight"][places]
        if self.model.embedding.norm:
            x = self.norm(x, "embedding.norm")
        if self.model.residual.channel_scales:
            x = (x + self.weights["embedding.shift"]) * self.weights["embedding.scale"]
        rows = self.model.residual.streams
        x = x if rows == 1 else x.unsqueeze(1).expand(-1, rows, -1)
        self.made: list = []
        embedded = x
        for number, block in enumerate(self.model.blocks):
            x = self.block(x, f"layers.{number}", block, places, documents)
            if self.model.residual.token_inputs:
                x = x + self.model.residual.multiplier * self.inputs(x, embedded, tokens, f"layers.{number}.inputs")
            x = x * self.fixed.get(f"layers.{number}.scale", 1.0)
        if rows > 1:
            x = self.read(x, f"layers.{number}.rows")[0]
        x = self.norm(x, "final_norm")
        head = self.get("head.weight")
        logits = torch.einsum("sh,vh->sv", x, self.weights["embedding.tokens.weight"] if head is None else head)
        logits = logits * self.model.head.multiplier
        if self.model.head.bias:
            logits = logits + self.weights["head.bias"]
        cap = self.model.head.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def block(self, x: Tensor, name: str, block, places, documents) -> Tensor:
        residual = self.model.residual

        def branch(y: Tensor, norm: str, layer) -> Tensor:
            y = self.norm(layer(y), norm) if residual.norm == "post" else layer(self.norm(y, norm))
            return y * residual.multiplier

        mixer = ffn = None
        if block.mixer:
            own = options_of(self.config.model, block.mixer)
            mixer = lambda y: branch(  # noqa: E731
                y, f"{name}.mixer_norm", lambda z: self.attention(z, f"{name}.attention", own, places, documents)
            )
        if block.ffn:
            shared = residual.shared_norm and block.mixer
            mlp = options_of(self.config.model, block.ffn)
            ffn = lambda y: branch(  # noqa: E731
                y, f"{name}.{'mixer_norm' if shared else 'ffn_norm'}", lambda z: self.mlp(z, f"{name}.mlp", mlp)
            )
        if mixer and ffn and residual.form == "parallel":
            return x + mixer(x) + ffn(x)
        for each, kind in ((mixer, "mixer"), (ffn, "ffn")):
            if each is not None and residual.streams > 1:
                collapsed, output, mix = self.read(x, f"{name}.{kind}_rows")
                x = output.unsqueeze(-1) * each(collapsed).unsqueeze(1) + torch.einsum("sij,sih->sjh", mix, x)
            elif each is not None and residual.channel_scales:
                a, b, c, d = (
                    self.weights[f"{name}.{kind}_joint.{part}"]
                    for part in ("branch_scale", "branch_shift", "stream_scale", "stream_shift")
                )
                x = (each(x) + b) * a + (x + d) * c
            elif each is not None and residual.norm == "deepnorm":
                x = residual.stream_multiplier * self.norm(x, f"{name}.{kind}_norm") + each(x)
            elif each is not None:
                x = x + each(x)
        return x

    def inputs(self, x: Tensor, embedded: Tensor, tokens: Tensor, name: str) -> Tensor:
        """Of Gemma 4's embeddings per layer, what is added to the stream x."""
        width = self.model.residual.token_inputs
        seen = self.norm(self.linear(embedded, f"{name}.projection") / math.sqrt(x.shape[-1]), "inputs_norm")
        known = self.weights[f"{name}.table.weight"][tokens] * math.sqrt(width)
        z = self.linear(x, f"{name}.gate")
        gate = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        return self.norm(self.linear(gate * (seen + known) / math.sqrt(2), f"{name}.output"), f"{name}.output_norm")

    def read(self, x: Tensor, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Xie et al. 2025, equations 5 to 9: of rows [S, n, H] what a branch reads, and weights of output and mix."""
        n, flat = x.shape[1], x.flatten(1)
        flat = flat / (flat.square().mean(-1, keepdim=True) + self.model.norm.epsilon).sqrt()
        made = flat @ self.weights[f"{name}.projection"].T
        bias, scale = self.weights[f"{name}.bias"], self.weights[f"{name}.scale"]
        sums = 1 / (1 + torch.exp(-(made[:, :n] * scale[0] + bias[:n]))) + 1e-6
        collapsed = torch.einsum("sn,snh->sh", sums, x)
        if len(scale) == 1:
            return collapsed, None, None
        output = 2 / (1 + torch.exp(-(made[:, n : 2 * n] * scale[1] + bias[n : 2 * n])))
        mix = (made[:, 2 * n :] * scale[2] + bias[2 * n :]).view(-1, n, n).exp()
        mix = mix / mix.sum(2, keepdim=True) + 1e-6
        for number in range(self.model.residual.sinkhorn_iterations):
            if number:
                mix = mix / (mix.sum(2, keepdim=True) + 1e-6)
            mix = mix / (mix.sum(1, keepdim=True) + 1e-6)
        return collapsed, output, mix

    def mlp(self, x: Tensor, name: str, own) -> Tensor:
        if own.activation == "xielu":
            alphas = (self.weights[f"{name}.{each}"] for each in ("alpha_p", "alpha_n"))
            grown, bent = (start + torch.log1p(torch.exp(each)) for start, each in zip((0, 0.5), alphas))
        activation = {
            "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
            "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
            "silu": lambda z: z / (1 + torch.exp(-z)),
            "relu": lambda z: z.clamp_min(0),
            "relu2": lambda z: z.clamp_min(0) ** 2,
            "identity": lambda z: z,
            "quick_gelu": lambda z: z / (1 + torch.exp(-1.702 * z)),
            "xielu": lambda z: 0.5 * z + torch.where(z > 0, grown * z * z, bent * (torch.exp(z.clamp_max(0)) - 1 - z)),
        }[own.activation]
        if not own.gated:
            return self.linear(activation(self.linear(x, f"{name}.up")), f"{name}.down")
        both = self.linear(x, f"{name}.gate_up")
        return self.linear(activation(both[:, : own.hidden_size]) * both[:, own.hidden_size :], f"{name}.down")

    def attention(self, x: Tensor, name: str, own, places, documents) -> Tensor:
        D, width = own.head_dim, own.kv_heads * own.head_dim
        q, earlier = self.linear(x, f"{name}.query"), own.keys == "earlier"
        if earlier:
            same = own.model_copy(update={"keys": "own"})
            made = next(keys for options, keys in reversed(self.made) if options == same)
            k = v = q.new_zeros(len(q), width)
        elif own.values == "keys":
            k = v = self.linear(x, f"{name}.key")
        else:
            both = self.linear(x, f"{name}.key_value")
            k, v = both[:, :width], both[:, width:]
        if own.qk_norm == "full":
            q = self.norm(q, f"{name}.query_norm", "rmsnorm")
            k = k if earlier else self.norm(k, f"{name}.key_norm", "rmsnorm")
        heads, keys = [], []
        for head in range(own.heads):
            of = head * own.kv_heads // own.heads
            q_h, k_h, v_h = q[:, head * D :][:, :D], k[:, of * D :][:, :D], v[:, of * D :][:, :D]
            if own.qk_norm == "head":
                q_h = self.norm(q_h, f"{name}.query_norm")
                k_h = k_h if earlier else self.norm(k_h, f"{name}.key_norm")
            if own.value_norm:
                v_h = v_h / (v_h.square().mean(-1, keepdim=True) + self.model.norm.epsilon).sqrt()
            if own.position == "rotary" and own.rotary.scaling.type == "proportional":
                q_h, k_h = (turned_in_proportion(each, places, own.rotary) for each in (q_h, k_h))
            elif own.position == "rotary":
                q_h, k_h = (turned(each, places, own.rotary.base, int(own.rotary.fraction * D)) for each in (q_h, k_h))
            keys.append(made[head] if earlier else (k_h, v_h))
            k_h, v_h = keys[head]
            sink = self.weights[f"{name}.sinks"][head] if own.sinks else None
            heads.append(self.one_head(q_h, k_h, v_h, own, head, documents, sink))
        self.made.append((own, keys))
        if own.gate != "none":
            gates = 1 / (1 + torch.exp(-self.linear(x, f"{name}.gate")))
            width = gates.shape[1] // own.heads
            heads = [y * gates[:, head * width :][:, :width] for head, y in enumerate(heads)]
        return self.linear(torch.cat(heads, -1), f"{name}.output")

    def one_head(self, q: Tensor, k: Tensor, v: Tensor, own, head: int, documents, sink: Tensor | None) -> Tensor:
        rows = []
        for place in range(len(q)):
            seen = [
                key
                for key in range(place + 1)
                if (own.window is None or place - key < own.window)
                and (documents is None or documents[key] == documents[place])
            ]
            scores = (k[seen] @ q[place]) * (own.scale if own.scale is not None else own.head_dim**-0.5)
            if own.softcap:
                scores = own.softcap * torch.tanh(scores / own.softcap)
            if own.position == "alibi":
                scores = scores - slope(head, own.heads) * (place - torch.tensor(seen, dtype=torch.float64))
            every = scores if sink is None else torch.cat([scores, sink[None]])
            rows.append(torch.exp(scores - every.logsumexp(0)) @ v[seen])
        return torch.stack(rows)


def slope(head: int, heads: int) -> float:
    """Press et al. 2021: for n heads, a power of two, 2^(-8/n) is both start and ratio. Else the slopes of the power of
    two below, then every other one of twice that."""
    if heads & (heads - 1) == 0:
        return (2 ** (-8 / heads)) ** (head + 1)
    below = 2 ** (heads.bit_length() - 1)
    return slope(head, below) if head < below else slope(2 * (head - below), 2 * below)


def turned(x: Tensor, places: list[int], base: float, width: int) -> Tensor:
    """Channels i and i + width/2 as one complex number, times e^(i place base^(-2i/width))."""
    half = width // 2
    pairs = torch.complex(x[:, :half], x[:, half:width])
    angles = torch.tensor(
        [[place * base ** (-2 * i / width) for i in range(half)] for place in places], dtype=torch.float64
    )
    pairs = pairs * torch.exp(1j * angles)
    return torch.cat([pairs.real, pairs.imag, x[:, width:]], -1)


def turned_in_proportion(x: Tensor, places: list[int], rotary) -> Tensor:
    """A head that turns whole, but for the last of its D/2 pairs of channels, which stay."""
    D = x.shape[1]
    kept = int(rotary.fraction * D) // 2
    whole = turned(x, [place / rotary.scaling.factor for place in places], rotary.base, D)
    moved = [channel % (D // 2) < kept for channel in range(D)]
    return torch.where(torch.tensor(moved), whole, x)


def loss_of(logits_BSV: Tensor, labels: Tensor, weights: Tensor, z_loss: float = 0.0) -> Tensor:
    """Weighted sum of -log p(label) + z (log Z)^2."""
    log_z = logits_BSV.logsumexp(-1)
    picked = logits_BSV.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (weights * (log_z - picked + z_loss * log_z**2)).sum()
