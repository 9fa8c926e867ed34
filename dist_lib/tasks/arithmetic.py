"""Addition as a task for reinforcement learning: prompts, answers and a reward that anyone can verify.

A prompt is ``012+345=`` in characters, zero-padded to a fixed width, and its answer ``0357`` has one digit more than
the numbers; so all sequences of a task are equally long and nothing is padded or masked. Sequences depend on the seed
alone. The model is the book's decoder with a vocabulary of twelve; how it is trained is in
:mod:`dist_lib.tasks.grpo` and :mod:`dist_lib.tasks.warm_start`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_lib.models import DecoderConfig

ALPHABET = "0123456789+="


@dataclass(frozen=True)
class Addition:
    """Sums of two numbers of at most ``digits`` digits.

    Attributes:
        digits: width of each number, 1 to 9.

    Raises:
        ValueError: another width.
    """

    digits: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9:
            raise ValueError(f"numbers have 1 to 9 digits here, not {self.digits}")

    @property
    def prompt_len(self) -> int:
        """Characters of a prompt."""
        return 2 * self.digits + 2

    @property
    def answer_len(self) -> int:
        """Characters of an answer."""
        return self.digits + 1

    @property
    def seq_len(self) -> int:
        """Characters of a prompt and its answer."""
        return self.prompt_len + self.answer_len

    def encode(self, text: str) -> Tensor:
        """Characters to tokens, (len(text),) int64.

        Raises:
            ValueError: a character outside the alphabet.
        """
        if set(text) - set(ALPHABET):
            raise ValueError(f"{text!r} has characters other than {ALPHABET!r}")
        return torch.tensor([ALPHABET.index(c) for c in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Tokens of one sequence, 1-D, to characters."""
        return "".join(ALPHABET[int(t)] for t in tokens)

    def problems(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw problems with replacement.

        Args:
            count: how many.
            generator: where chance comes from; on the CPU.

        Returns:
            Prompts (count, prompt_len) and right answers (count, answer_len), both int64.
        """
        a, b = torch.randint(0, 10**self.digits, (2, count), generator=generator)
        plus, equals = (torch.full((count, 1), ALPHABET.index(c)) for c in "+=")
        prompts = torch.cat((self._digits(a, self.digits), plus, self._digits(b, self.digits), equals), dim=1)
        return prompts, self._digits(a + b, self.answer_len)

    def reward(self, prompts: Tensor, answers: Tensor) -> Tensor:
        """1 for the right sum in the right form, else 0; computed from the prompt itself.

        Args:
            prompts: (N, prompt_len) int64.
            answers: (N, answer_len) int64.

        Returns:
            (N,) float32.
        """
        power = 10 ** torch.arange(self.digits - 1, -1, -1)
        a = (prompts[:, : self.digits] * power).sum(1)
        b = (prompts[:, self.digits + 1 : 2 * self.digits + 1] * power).sum(1)
        return (answers == self._digits(a + b, self.answer_len)).all(1).float()

    @staticmethod
    def _digits(numbers: Tensor, width: int) -> Tensor:
        """(N,) -> (N, width), most significant digit first."""
        return numbers[:, None] // 10 ** torch.arange(width - 1, -1, -1) % 10

    def model_config(self, *, d_model: int = 128, n_layers: int = 3, d_ff: int = 352) -> DecoderConfig:
        """Shape of a decoder for this task; 0.6 million parameters as it stands.

        Args:
            d_model: width, a multiple of 8.
            n_layers: layers.
            d_ff: width of the MLP.
        """
        return DecoderConfig(
            vocab_size=len(ALPHABET),
            d_model=d_model,
            n_layers=n_layers,
            n_heads=4,
            n_kv_heads=4,
            d_ff=d_ff,
            max_seq_len=self.seq_len,
            tie_embeddings=True,
        )
