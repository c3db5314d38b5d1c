"""The recurrence of RWKV-7 (Peng et al. 2025) as matrix products over chunks of the sequence.

Shapes: B samples, S positions, h heads of N channels, c chunks of Q positions. Per head, with S [N values, N keys]:

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T          0.54 < w < 1
    y_t = S_t r_t

Inside a chunk, u_t = S_{t-1} a_t follows from the u of earlier tokens: a unit lower triangular system, which is solved
for all chunks at once. With it the state after a chunk is affine in the state before: S' = S M + Z.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wkv7(
    r_BShN: Tensor,
    log_w_BShN: Tensor,
    k_BShN: Tensor,
    v_BShN: Tensor,
    a_BShN: Tensor,
    b_BShN: Tensor,
    *,
    chunk: int,
    initial_BhNN: Tensor | None = None,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, S, h, N] and the state after the last position [B, h, N, N], of fp32 tensors.

    Args:
        log_w_BShN: between -0.61 and 0: a chunk's decays and their inverses are then within fp32's range.
        initial_BhNN: state before the first position; zero if None.
        starts_BS: index of the first token of each token's document (`document_starts`): states do not cross it.
    """
    length = r_BShN.shape[1]
    chunk = min(chunk, length)
    room = -length % chunk
    r, log_w, k, v, a, b = (_chunks(each, chunk, room) for each in (r_BShN, log_w_BShN, k_BShN, v_BShN, a_BShN, b_BShN))
    # Sums of logarithms are float64: a difference of two large sums must keep the digits of a short stretch. Factors
    # are relative to the middle of the range, so that neither they nor their inverses are large.
    total = log_w.double().cumsum(-2)
    half = total[..., -1:, :] / 2
    readers = torch.cat([a * (total - log_w - half).float().exp(), r * (total - half).float().exp()], -2)
    writers = torch.cat([b, k], -2) * (half - total).float().exp().repeat(1, 1, 1, 2, 1)
    seen, begun, ended, through = _within_documents(starts_BS, length, chunk, room, r.device)
    scores = (readers @ writers.mT).masked_fill(~seen, 0.0)

    half = half.float().exp()
    readers, writers = readers * half, writers * half  # now relative to the chunk's begin and to its end
    if starts_BS is not None:
        readers, writers = readers * begun, writers * ended
    wanted = torch.cat([scores[..., :chunk, chunk:] @ v, readers[..., :chunk, :]], -1)
    # Forward substitution: a product of powers of the scores would lose all digits where keys repeat.
    own, of_state = torch.linalg.solve_triangular(
        -scores[..., :chunk, :chunk], wanted, upper=False, unitriangular=True).chunk(2, -1)
    affine = torch.diag_embed(half.squeeze(-2).square() * through) + of_state.mT @ writers[..., :chunk, :]
    before, final = _carry(affine, torch.cat([own, v], -2).mT @ writers, initial_BhNN)
    u = own + of_state @ before.mT
    y = readers[..., chunk:, :] @ before.mT + scores[..., chunk:, :] @ torch.cat([u, v], -2)
    return y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length], final


def _chunks(x_BShN: Tensor, chunk: int, room: int) -> Tensor:
    """[B, h, c, Q, N]; what is missing in the last chunk writes nothing and decays nothing."""
    return F.pad(x_BShN, (0, 0, 0, 0, 0, room)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous()


def _within_documents(starts_BS: Tensor | None, length: int, chunk: int, room: int, device: torch.device):
    """Which writers each reader sees [B, 1, c, 2 Q, 2 Q]; which readers see the state before their chunk, and which
    writers the state after it keeps [B, 1, c, 2 Q, 1]; whether it keeps the state before [B, 1, c, 1]."""
    square = torch.ones(chunk, chunk, dtype=torch.bool, device=device)
    causal = torch.cat([square.tril(-1), square.tril()]).repeat(1, 2)
    if starts_BS is None:
        return causal, None, None, 1.0
    starts = F.pad(starts_BS.double(), (0, room), mode="replicate").unflatten(1, (-1, chunk)).unsqueeze(1)
    first = torch.arange(0, length, chunk, device=device).view(1, 1, -1, 1)
    places = first + torch.arange(chunk, device=device)
    twice = (1, 1, 1, 2)
    seen = causal & (places.unsqueeze(-2) >= starts.unsqueeze(-1)).repeat(1, 1, 1, 2, 2)
    begun = (starts < first).repeat(twice).unsqueeze(-1)
    ended = (places >= starts[..., -1:]).repeat(twice).unsqueeze(-1)
    return seen, begun, ended, starts[..., -1:] < first


def _carry(affine_BhcNN: Tensor, written_BhcNN: Tensor, initial_BhNN: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [B, h, c, N, N], and after the last one."""
    state = torch.zeros_like(written_BhcNN[:, :, 0]) if initial_BhNN is None else initial_BhNN
    before = []
    for affine, written in zip(affine_BhcNN.unbind(2), written_BhcNN.unbind(2)):
        before.append(state)
        state = state @ affine + written
    return torch.stack(before, 2), state
