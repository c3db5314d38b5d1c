"""The way of rows to the ranks that have their experts, between `permute` and the experts' work, and back."""

from __future__ import annotations

from torch import Tensor


class Stay:
    """Every rank has all experts (or its slice of each): rows stay where they are."""

    def send(self, rows_RH: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor, object]:
        """Rows sorted by expert, [R, H], with int32 ends [E].

        Returns:
            The rows that this rank's experts work on, sorted by expert, their ends [experts here], and what `back` needs.
        """
        return rows_RH, ends_E, None

    def back(self, y_RH: Tensor, sent: object) -> Tensor:
        """What the experts made of the rows of `send`, in the order of the rows given to it."""
        return y_RH
