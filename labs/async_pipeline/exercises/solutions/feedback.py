"""Reference solution."""

from torch import Tensor


class Feedback:
    def __init__(self) -> None:
        self.previous: Tensor | None = None

    def displacement(self, update: Tensor) -> Tensor:
        corrected = update.clone() if self.previous is None else 2 * update - self.previous
        self.previous = update.clone()
        return corrected
