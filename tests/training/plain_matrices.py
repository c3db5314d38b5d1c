"""Optimizers of whole matrices, written from their papers, for the plain run of `runs`: one process, nothing cut."""

from __future__ import annotations

import math

import numpy as np
import torch

from megatron.parallel.layout.shard import LogicalTensor, Role


def is_matrix(logical: LogicalTensor) -> bool:
    inside = logical.role in (Role.HIDDEN, Role.OUTPUT)
    return inside and (len(logical.shape) == 2 or (len(logical.shape) == 3 and logical.matrices is not None))


def blocks(tensor: torch.Tensor, logical: LogicalTensor) -> list[torch.Tensor]:
    """Views of the matrices that are fused in a tensor: experts, and in each query, key and value, or gate and up."""
    experts = tensor if tensor.dim() == 3 else [tensor]
    return [part for expert in experts for part in expert.split(list(logical.matrices or (expert.shape[0],)))]


class PlainMuon:
    """By singular values: the iteration X <- aX + bXX'X + cXX'XX'X maps each to a s + b s^3 + c s^5 and keeps the
    singular vectors.
    """

    def __init__(self, options) -> None:
        self.rate, self.momentum, self.scale = options.muon_lr, options.muon_momentum, options.muon_scale
        self.per_head = options.options.get("per_head", False)
        self.polar = options.options.get("polynomials") == "polar_express"

    def blocks(self, tensor: torch.Tensor, logical: LogicalTensor) -> list[torch.Tensor]:
        found = blocks(tensor, logical)
        if not (self.per_head and logical.heads):
            return found
        return [head for matrix, (_, rows) in zip(found, logical.heads, strict=True) for head in matrix.split(rows)]

    def start(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(matrix)}

    def direction(self, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        rows, columns = gradient.shape
        size = 0.2 * max(rows, columns) ** 0.5 if self.scale == "moonlight" else max(1, rows / columns) ** 0.5
        return size * self.orthogonal(state, gradient)

    def orthogonal(self, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        state["momentum"].mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
        left, values, right = torch.linalg.svd(
            (1 - self.momentum) * gradient + self.momentum * state["momentum"], full_matrices=False
        )
        values = values / values.square().sum().sqrt().clamp(min=1e-7)  # an expert that saw no token
        if self.polar:
            values = values / 1.02
        for a, b, c in polar_express(5) if self.polar else 5 * [(3.4445, -4.7750, 2.0315)]:
            values = a * values + b * values**3 + c * values**5
        return (left * values) @ right


class PlainNorMuon(PlainMuon):
    """Algorithm 1 of arXiv 2510.05491 with the norm kept, as in the authors' program."""

    def __init__(self, options) -> None:
        super().__init__(options)
        self.beta2 = options.options.get("beta2", 0.95)

    def start(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().start(matrix) | {"square": torch.zeros(matrix.shape[0], 1, dtype=matrix.dtype)}

    def orthogonal(self, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        found = super().orthogonal(state, gradient)
        state["square"] = self.beta2 * state["square"] + (1 - self.beta2) * (found**2).mean(1, keepdim=True)
        divided = found / (state["square"].sqrt() + 1e-8)
        return divided * found.norm() / divided.norm().clamp(min=1e-8)


class PlainDion:
    """Algorithm 1 of arXiv 2504.05295, with a given first basis."""

    def __init__(self, options) -> None:
        self.rate, self.mu, self.share = options.muon_lr, options.muon_momentum, options.options.get("rank", 0.25)

    def start(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = matrix.shape
        draw = torch.Generator().manual_seed(columns)
        basis = torch.randn(columns, math.ceil(self.share * min(rows, columns)), generator=draw, dtype=torch.float64)
        return {"momentum": torch.zeros_like(matrix), "basis": basis.to(matrix.dtype)}

    def direction(self, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        total = state["momentum"] + gradient
        left = torch.linalg.qr(total @ state["basis"])[0]
        right = total.T @ left
        state["momentum"] = total - (1 - self.mu) * left @ right.T
        if right.any():
            state["basis"] = right / right.norm(dim=0)
        rows, columns = gradient.shape
        return (rows / columns) ** 0.5 * left @ state["basis"].T * bool(right.any())


def quintic(low: float, high: float) -> tuple[float, float, float]:
    """The odd polynomial of degree 5 that is nearest to 1 on [low, high], by Remez's exchange of points."""
    inner, found = [(3 * low + high) / 4, (low + 3 * high) / 4], None
    for _ in range(100):
        points = np.array([low, *inner, high])
        rows = np.stack([points, points**3, points**5, [1, -1, 1, -1]], 1)
        *abc, error = np.linalg.solve(rows, np.ones(4))
        if found is not None and abs(error - found) < 1e-15:
            break
        a, b, c = abc
        found, inner = error, np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return tuple(abc)


def polar_express(steps: int, low: float = 1e-3, margin: float = 1.02, cushion: float = 0.02) -> list:
    """The coefficients of arXiv 2505.16932, section 3: greedily the best quintic for the interval that is left."""
    found, high = [], 1.0
    for number in range(steps):
        coefficients = np.array(quintic(max(low, cushion * high), high))
        if cushion * high > low:  # centred on what is there
            coefficients *= 2 / (_value(coefficients, low) + _value(coefficients, high))
        if number < steps - 1:
            coefficients /= margin ** np.array([1, 3, 5])
        found.append(tuple(float(each) for each in coefficients))
        low = _value(coefficients, low)
        high = 2 - low
    return found


def _value(coefficients, x: float) -> float:
    return float(coefficients @ np.array([x, x**3, x**5]))


class PlainSOAP:
    """Algorithms 3 and 4 of the paper, the first step omitted as in the authors' program."""

    def __init__(self, options) -> None:
        own = options.options
        self.rate, self.betas, self.epsilon = options.lr, options.betas, options.epsilon
        self.beta, self.frequency = own.get("beta", options.betas[1]), own.get("frequency", 10)

    def start(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"average": torch.zeros_like(matrix), "square": torch.zeros_like(matrix), "step": 0}

    def direction(self, state: dict, gradient: torch.Tensor) -> torch.Tensor:
        grams = [gradient @ gradient.T, gradient.T @ gradient]
        state["step"] += 1
        t = state["step"] - 1
        if t == 0:
            state["factors"] = [(1 - self.beta) * gram for gram in grams]
            state["bases"] = [_eigenvectors(gradient), _eigenvectors(gradient.T)]
            return torch.zeros_like(gradient)
        left, right = state["bases"]
        beta1, beta2 = self.betas
        state["average"] = beta1 * state["average"] + (1 - beta1) * gradient
        state["square"] = beta2 * state["square"] + (1 - beta2) * (left.T @ gradient @ right) ** 2
        mean = left.T @ state["average"] @ right / (1 - beta1**t)
        step = (
            left @ (mean / ((state["square"] / (1 - beta2**t)).sqrt() + self.epsilon / (1 - beta2**t) ** 0.5)) @ right.T
        )
        state["factors"] = [self.beta * f + (1 - self.beta) * gram for f, gram in zip(state["factors"], grams)]
        if t % self.frequency == 0:
            state["square"], state["bases"][0] = _iterate(state["factors"][0], left, state["square"])
            turned, state["bases"][1] = _iterate(state["factors"][1], right, state["square"].T)
            state["square"] = turned.T
        return step


def _eigenvectors(matrix: torch.Tensor) -> torch.Tensor:
    """Of the gradient times its transpose, the largest eigenvalue first. The null space has the project's basis."""
    values, vectors = torch.linalg.eigh(matrix.double() @ matrix.double().T)
    if values[-1] == 0:
        vectors = vectors[:, :0]
    known = vectors[:, values > 1e-10 * values[-1]].flip(1) if vectors.numel() else vectors
    rows = len(matrix)
    if known.shape[1] < rows:
        draw = torch.Generator().manual_seed(rows)
        fixed = torch.randn(rows, rows - known.shape[1], generator=draw, dtype=torch.float64)
        known = torch.cat([known, torch.linalg.qr(fixed - known @ known.T @ fixed)[0]], 1)
    return known.to(matrix.dtype)


def _iterate(factor: torch.Tensor, basis: torch.Tensor, square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = (basis.T @ factor @ basis).diagonal().argsort(descending=True)
    shifted = factor + 1e-6 * factor.trace().clamp(min=1e-30) * torch.eye(len(factor), dtype=factor.dtype)
    return square[order], torch.linalg.qr(shifted @ basis[:, order])[0]


class PlainJorge:
    """The paper's algorithm with the coefficient that makes its series converge."""

    def __init__(self, options) -> None:
        self.rate, self.momentum = options.options.get("lr", options.lr), options.momentum
        self.frequency, self.begin = options.options.get("frequency", 10), options.options.get("start", 1e-6)

    def start(self, matrix: torch.Tensor) -> dict:
        roots = [torch.eye(size, dtype=matrix.dtype) * self.begin**-0.25 for size in matrix.shape]
        return {"roots": roots, "plain": torch.zeros_like(matrix), "average": torch.zeros_like(matrix), "step": 0}

    def direction(self, state: dict, gradient: torch.Tensor) -> torch.Tensor:
        if state["step"] % self.frequency == 0 and gradient.any():
            for side, gram in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
                root = state["roots"][side]
                x = torch.linalg.matrix_power(root, 4) @ gram
                beta = x.norm() / (x.norm() + 1)
                a = (1 - beta) / beta * x
                root = beta**-0.25 * root @ (torch.eye(len(a), dtype=a.dtype) - a / 4 + 5 / 32 * a @ a)
                state["roots"][side] = (root + root.T) / 2
        state["step"] += 1
        state["plain"] = self.momentum * state["plain"] + gradient
        new = state["roots"][0] @ gradient @ state["roots"][1]
        state["average"] = self.momentum * state["average"] + (1 - self.momentum) * new
        return state["average"] * (state["plain"].norm() / state["average"].norm().clamp(min=1e-30))


class PlainAdEMAMix:
    """The paper's equations for masters that have their gradients. `warmup` is over from the step that it names."""

    def __init__(self, options, masters: list[torch.Tensor], rates: list, decays: list, epsilons: list) -> None:
        self.options, self.masters, self.rates, self.decays, self.t = options, masters, rates, decays, 0
        self.epsilons = epsilons
        self.fast, self.slow, self.square = ([torch.zeros_like(each) for each in masters] for _ in range(3))

    def step(self) -> None:
        self.t += 1
        (b1, b2), own, t = self.options.betas, self.options.options, self.t
        alpha, b3, share = own["alpha"], own["slow"], min(1.0, t / own["warmup"])
        if share < 1:
            alpha *= share
            b3 = min(b3, math.exp(math.log(b1) / (1 - share + share * math.log(b1) / math.log(b3))))
        for i, master in enumerate(self.masters):
            gradient = master.grad
            self.fast[i] = b1 * self.fast[i] + (1 - b1) * gradient
            self.slow[i] = b3 * self.slow[i] + (1 - b3) * gradient
            self.square[i] = b2 * self.square[i] + (1 - b2) * gradient**2
            size = (self.square[i] / (1 - b2**t)).sqrt() + self.epsilons[i]
            update = (self.fast[i] / (1 - b1**t) + alpha * self.slow[i]) / size + self.decays[i] * master.data
            master.data -= self.rates[i] * update


def every_matrix(logical: LogicalTensor) -> bool:
    """Embeddings, the head and routers too."""
    return len(logical.shape) == 2 or (len(logical.shape) == 3 and logical.matrices is not None)


class PlainAdafactor:
    """Algorithm 5 of arXiv 1804.04235 without its relative step size, of one matrix."""

    takes = staticmethod(every_matrix)

    def __init__(self, options) -> None:
        own = options.options
        self.rate, self.decay, self.clip = options.lr, own.get("decay", 0.8), own.get("clip", 1.0)

    def start(self, matrix: torch.Tensor) -> dict:
        return {"rows": torch.zeros(matrix.shape[0]), "columns": torch.zeros(matrix.shape[1]), "step": 0}

    def direction(self, state: dict, gradient: torch.Tensor) -> torch.Tensor:
        state["step"] += 1
        beta, square = 1 - state["step"] ** -self.decay, gradient**2 + 1e-30
        state["rows"] = beta * state["rows"] + (1 - beta) * square.sum(1)
        state["columns"] = beta * state["columns"] + (1 - beta) * square.sum(0)
        estimate = torch.outer((state["rows"] / state["rows"].sum()).sqrt(), state["columns"].sqrt())
        update = gradient / estimate
        return update / max(1.0, float(update.square().mean().sqrt()) / self.clip)


class PlainAdamMini:
    """Algorithms 1 to 3 of arXiv 2406.16793: a second moment for each head of queries and keys, and for each row of
    other matrices. Its input is one such block.
    """

    takes = staticmethod(every_matrix)

    def __init__(self, options) -> None:
        self.rate, self.betas, self.epsilon = options.lr, options.betas, options.epsilon

    @staticmethod
    def blocks(tensor: torch.Tensor, logical: LogicalTensor) -> list[torch.Tensor]:
        found = []
        for number, matrix in enumerate(blocks(tensor, logical)):
            what, rows = logical.heads[number] if logical.heads else ("", 1)
            found += matrix.split(rows if what in ("query", "key") else 1)
        return found

    def start(self, block: torch.Tensor) -> dict:
        return {"average": torch.zeros_like(block), "square": 0.0, "step": 0}

    def direction(self, state: dict, gradient: torch.Tensor) -> torch.Tensor:
        (b1, b2), state["step"] = self.betas, state["step"] + 1
        state["average"] = b1 * state["average"] + (1 - b1) * gradient
        state["square"] = b2 * state["square"] + (1 - b2) * gradient.square().mean()
        size = (state["square"] / (1 - b2 ** state["step"])).sqrt() + self.epsilon
        return state["average"] / (1 - b1 ** state["step"]) / size


class PlainAdamW8bit:
    """AdamW whose moments are rounded to torchao's 8 bits after each step, by blocks of the flattened matrix."""

    def __init__(self, options) -> None:
        self.rate, self.betas, self.epsilon = options.lr, options.betas, options.epsilon
        self.smallest = options.options["smallest"]

    def takes(self, logical: LogicalTensor) -> bool:
        elements = logical.shape[-2] * logical.shape[-1] if len(logical.shape) > 1 else 0
        return every_matrix(logical) and elements >= self.smallest and elements % 256 == 0

    def blocks(self, tensor: torch.Tensor, logical: LogicalTensor) -> list[torch.Tensor]:
        return list(tensor) if tensor.dim() == 3 else [tensor]

    def start(self, matrix: torch.Tensor) -> dict:
        from torchao.optim.subclass_8bit import OptimState8bit

        return {"step": 0, "kept": [OptimState8bit.zeros((matrix.numel(),), signed) for signed in (True, False)]}

    def direction(self, state: dict, gradient: torch.Tensor) -> torch.Tensor:
        (b1, b2), state["step"] = self.betas, state["step"] + 1
        moments = []
        for kept, beta, value in zip(state["kept"], (b1, b2), (gradient, gradient**2)):
            moments.append(beta * kept.dequantize() + (1 - beta) * value.flatten())
            kept.copy_(moments[-1].float())
        size = (moments[1] / (1 - b2 ** state["step"])).sqrt() + self.epsilon
        return (moments[0] / (1 - b1 ** state["step"]) / size).view_as(gradient)


PLAIN = {
    "muon": PlainMuon,
    "normuon": PlainNorMuon,
    "dion": PlainDion,
    "soap": PlainSOAP,
    "jorge": PlainJorge,
    "adafactor": PlainAdafactor,
    "adam_mini": PlainAdamMini,
    "adamw_8bit": PlainAdamW8bit,
}


class PlainMatrices:
    """One of these rules for each matrix inside a block (or what the rule takes), torch's AdamW for all other tensors.

    A parametrization scales AdamW's steps. A matrix's step does not grow with the width, so only the depth's part of
    its scales remains: the product of rate and decay (docs/parametrization.md).
    """

    def __init__(self, options, logicals: list[LogicalTensor], masters: list[torch.Tensor], decays: list[float]):
        self.rule, self.logicals, self.masters = PLAIN[options.type](options), logicals, masters
        self.cautious = options.options.get("cautious", False)
        takes, self.blocks = getattr(self.rule, "takes", is_matrix), getattr(self.rule, "blocks", blocks)
        self.decays = [decay / each.scales.weight_decay for decay, each in zip(decays, logicals)]
        self.rates = [self.rule.rate * each.scales.lr * each.scales.weight_decay for each in logicals]
        rest = [
            {
                "params": [m],
                "weight_decay": decay,
                "lr": options.lr * logical.scales.lr,
                "eps": options.epsilon * logical.scales.epsilon,
            }
            for m, decay, logical in zip(masters, decays, logicals)
            if not takes(logical)
        ]
        adamw = PlainCautious if self.cautious else torch.optim.AdamW
        self.adamw = adamw(rest, lr=options.lr, betas=options.betas, foreach=False)
        self.states = [
            [self.rule.start(block) for block in self.blocks(m, logical)] if takes(logical) else []
            for m, logical in zip(masters, logicals)
        ]

    def step(self, gradients: list[torch.Tensor]) -> None:
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient
        self.adamw.step()
        for master, gradient, logical, rate, decay, states in zip(
            self.masters, gradients, self.logicals, self.rates, self.decays, self.states
        ):
            pairs = zip(self.blocks(master, logical), self.blocks(gradient, logical), states) if states else ()
            for matrix, part, state in pairs:
                step = self.rule.direction(state, part)
                decayed = matrix * (step * matrix >= 0) if self.cautious else matrix
                matrix -= rate * (step + decay * decayed)


class PlainCautious(torch.optim.AdamW):
    """Weight decay of arXiv 2510.12402, done after a step of torch's AdamW without decay."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["decay"], group["weight_decay"] = group.get("decay", group["weight_decay"]), 0.0
        begin = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                step = (begin[p] - p) / group["lr"]
                p.sub_(group["lr"] * group["decay"] * torch.where(step * begin[p] >= 0, begin[p], 0.0))
