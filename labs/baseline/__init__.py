"""Lab: one training step, weighed. The control that every other lab is compared with."""
