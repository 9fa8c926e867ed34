"""Distributed LLM training, reproduced: the library behind the book.

Importing ``dist_lib`` is light (no torch, no plotly, no Triton); import the part that you need:
``dist_lib.comm``, ``dist_lib.ops``, ``dist_lib.optim``, ``dist_lib.models``, ``dist_lib.tasks``.
"""

__version__ = "0.1.0"
