"""Wrong: keeps the caller's tensor, whose memory is reused."""


class Feedback:
    previous = None

    def displacement(self, update):
        corrected = update.clone() if self.previous is None else 2 * update - self.previous
        self.previous = update
        return corrected
