"""Wrong: treats the update before the first as zero."""

import torch


class Feedback:
    previous = None

    def displacement(self, update):
        previous = torch.zeros_like(update) if self.previous is None else self.previous
        self.previous = update.clone()
        return 2 * update - previous
