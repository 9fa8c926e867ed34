"""What the models learn from: a real text corpus and deterministic batches of it.

:func:`load_corpus` reads and checks the text; :class:`BatchSampler` draws the same batches on any number of ranks.
"""

from dist_lib.tasks.batches import BatchSampler
from dist_lib.tasks.corpus import CorpusError, TextCorpus, load_corpus

__all__ = ["BatchSampler", "CorpusError", "TextCorpus", "load_corpus"]
