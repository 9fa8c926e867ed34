"""Wrong: remembers the displacement, which then alternates without end."""


class Feedback:
    previous = None

    def displacement(self, update):
        corrected = update.clone() if self.previous is None else 2 * update - self.previous
        self.previous = corrected.clone()
        return corrected
