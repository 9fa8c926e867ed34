"""What the models learn from: a real text corpus in deterministic batches, and addition with verifiable rewards.

:func:`load_corpus` reads and checks the text; :class:`BatchSampler` draws the same batches on any number of ranks.
:class:`Addition` poses sums; :func:`warm_start` learns them from answers, :class:`GrpoTrainer` from rewards.
"""

from dist_lib.tasks.arithmetic import Addition
from dist_lib.tasks.batches import BatchSampler
from dist_lib.tasks.corpus import CorpusError, TextCorpus, load_corpus
from dist_lib.tasks.grpo import (
    GrpoConfig,
    GrpoStep,
    GrpoTrainer,
    Rollouts,
    VerifiableTask,
    answer_log_probs,
    group_advantages,
    grpo_loss,
    sample_rollouts,
    token_log_probs,
)
from dist_lib.tasks.warm_start import accuracy, answer_loss, greedy_answers, warm_start

__all__ = [
    "Addition",
    "BatchSampler",
    "CorpusError",
    "GrpoConfig",
    "GrpoStep",
    "GrpoTrainer",
    "Rollouts",
    "TextCorpus",
    "VerifiableTask",
    "accuracy",
    "answer_log_probs",
    "answer_loss",
    "greedy_answers",
    "group_advantages",
    "grpo_loss",
    "load_corpus",
    "sample_rollouts",
    "token_log_probs",
    "warm_start",
]
