"""Real activations: what SmolLM2-135M computes on the pinned text, how it is distributed, and what few bits do to it.

``python -m labs.agoq.activations`` records them, for not every reader has the weights installed: the chapter reads the
record. For each layer and each kind of tensor: spread, outliers, histograms of numbers within their block and of the
blocks' largest, and each format's error. For the whole model: the error of each kind of layer's own gradient, and of
the whole gradient by what is stored encoded. :func:`record` does it for any decoder of ours; nothing is trained here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from dist_lib import results
from dist_lib.agoq import Format
from dist_lib.agoq.quality import SCHEMES, exact_gradient, gradient_quality, local_errors
from dist_lib.models import Attention, Decoder, load_smollm2
from dist_lib.ops import quantize
from dist_lib.tasks import BatchSampler, load_corpus

RECORD = Path(__file__).resolve().parents[2] / "data" / "results" / "agoq-activations.json"
COMMAND = "python -m labs.agoq.activations"
KINDS = {
    "norm 1 input": "stored",
    "norm 1 output": "rebuilt",
    "queries": "left alone",
    "keys": "left alone",
    "values": "left alone",
    "attention output": "stored",
    "norm 2 input": "stored",
    "norm 2 output": "rebuilt",
    "gate": "stored",
    "up": "stored",
    "product": "rebuilt",
}
"""What is looked at, and what AGoQ does with it (with attention's output: in the paper's layout)."""
CODECS = ("fp4", "e2m1", "nf4", "int4", "int5", "int6", "int8", "dynamic8")
GRADIENT_CODECS = ("fp4", "nf4", "int8")
VALUE_EDGES = tuple(i / 16.5 - 1 for i in range(34))  # 33 bins, the middle one around 0
BLOCK_EDGES = tuple(i / 2 - 4 for i in range(25))  # powers of 2 of the root mean square; outer bins take the rest
PER = 10_000  # histograms count shares of this
SIZES = {"batch_size": 4, "seq_len": 128}

_HOOKED = {  # kind: (module of a layer, whether its output is meant)
    "norm 1 input": ("input_layernorm", False),
    "norm 1 output": ("input_layernorm", True),
    "attention output": ("self_attn.o_proj", False),
    "norm 2 input": ("post_attention_layernorm", False),
    "norm 2 output": ("post_attention_layernorm", True),
    "gate": ("mlp.gate_proj", True),
    "up": ("mlp.up_proj", True),
    "product": ("mlp.down_proj", False),
}


class _Watched(Attention):
    seen: dict[str, Tensor]

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = self.config.n_heads // self.config.n_kv_heads  # keys and values arrive once for each query head
        for name, heads in (("queries", q), ("keys", k[:, ::groups]), ("values", v[:, ::groups])):
            self.seen[name] = heads.detach().transpose(1, 2).flatten(2)
        return super().weigh(q, k, v)


@contextmanager
def captured(model: Decoder) -> Iterator[list[dict[str, Tensor]]]:
    """For each layer the tensors of :data:`KINDS`, (B, S, width), of the forward pass within the context.

    Queries and keys are rotated; keys and values stand once for each of their heads.
    """
    found: list[dict[str, Tensor]] = [{} for _ in model.layers]
    handles = []

    def watch(seen: dict[str, Tensor], name: str, module: nn.Module, output: bool) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
            seen[name] = (result if output else inputs[0]).detach()

        handles.append(module.register_forward_hook(hook))

    attentions = [layer.get_submodule("self_attn") for layer in model.layers]
    try:
        for seen, layer, attention in zip(found, model.layers, attentions, strict=True):
            for name, (path, output) in _HOOKED.items():
                watch(seen, name, layer.get_submodule(path), output)
            attention.__class__ = _Watched
            attention.seen = seen  # type: ignore[assignment]
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for attention in attentions:
            attention.__class__ = Attention
            attention.__dict__.pop("seen", None)


def _figures(value: float) -> float:
    return float(f"{value:.4g}")


def _histogram(values: Tensor, edges: Sequence[float]) -> list[int]:
    """Shares of :data:`PER` by bin; what lies outside counts in the outer bins."""
    inner = torch.tensor(edges[1:-1], dtype=values.dtype)
    counts = torch.bincount(torch.bucketize(values.flatten(), inner), minlength=len(edges) - 1)
    return [round(PER * c / values.numel()) for c in counts.tolist()]


def summary(x: Tensor, block_size: int) -> dict[str, Any]:
    """What is recorded of one tensor (..., width).

    Args:
        x: the numbers; blocks run along the last dimension.
        block_size: numbers that share a scale; divides the width.

    Returns:
        ``rms``; ``absmax``; ``outlier``: the largest channel's root mean square over the median channel's; ``values``:
        histogram of numbers over their block's largest; ``blocks``: histogram of the blocks' largest over ``rms``, in
        powers of 2; ``errors``: relative L2 distance after one trip through each of :data:`CODECS`.

    Raises:
        ValueError: a width that blocks do not divide.
    """
    if x.shape[-1] % block_size:
        raise ValueError(f"blocks of {block_size} do not divide a width of {x.shape[-1]}: choose a smaller block")
    rows = x.float().flatten(0, -2)
    rms, channels = rows.square().mean().sqrt(), rows.square().mean(0).sqrt()
    blocks = rows.reshape(-1, block_size)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return {
        "rms": _figures(float(rms)),
        "absmax": _figures(float(rows.abs().max())),
        "outlier": _figures(float(channels.max() / channels.median())),
        "values": _histogram(blocks / largest, VALUE_EDGES),
        "blocks": _histogram((largest / rms).log2(), BLOCK_EDGES),
        "errors": {
            codec: _figures(float((quantize(rows, codec, block_size).dequantize() - rows).norm() / rows.norm()))
            for codec in CODECS
        },
    }


def record(
    model: Decoder, tokens: Tensor, targets: Tensor, *, block_size: int = 64, schemes: Sequence[str] = tuple(SCHEMES)
) -> dict[str, Any]:
    """Everything that is recorded of a model on one batch.

    Args:
        model: plain layers; left as it is.
        tokens, targets: (B, S) int64.
        block_size: numbers that share a scale; divides the model's widths.
        schemes: of :data:`~dist_lib.agoq.quality.SCHEMES`, for the whole gradient.

    Returns:
        ``loss``; ``layers``: by layer and kind, see :func:`summary`; ``by_kind``: by codec, the error of each kind of
        layer's own gradient, all layers together; ``gradient``: by codec and scheme, error and cosine of the whole.
    """
    with captured(model) as found, torch.no_grad():
        loss = float(model.loss(tokens, targets))
    layers = [{kind: summary(seen.pop(kind), block_size) for kind in KINDS} for seen in found]
    exact = exact_gradient(model, tokens, targets)
    by_kind: dict[str, Any] = {}
    gradient: dict[str, Any] = {}
    for codec in GRADIENT_CODECS:
        form = Format(codec, block_size)
        by_kind[codec] = {k: _figures(e) for k, e in local_errors(model, tokens, targets, form).items()}
        gradient[codec] = {}
        for scheme in schemes:
            quality = gradient_quality(model, tokens, targets, scheme, form, exact=exact)
            gradient[codec][scheme] = [_figures(quality.relative_l2), round(quality.cosine, 5)]
    return {
        "loss": round(loss, 4),
        "block_size": block_size,
        "value_edges": [round(e, 5) for e in VALUE_EDGES],
        "block_edges": list(BLOCK_EDGES),
        "by_kind": by_kind,
        "gradient": gradient,
        "layers": layers,
    }


def batch_of(tokenizer: Any, seed: int) -> tuple[Tensor, Tensor]:
    """The batch that is recorded: four windows of 128 tokens of the pinned text, and what follows each token."""
    text = bytes(load_corpus().train[:400_000].tolist()).decode("utf-8", errors="replace")
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    return BatchSampler(tokens, **SIZES, seed=seed).batch(0)


def as_text(found: dict[str, Any]) -> str:
    """A record as compact JSON, one layer a line."""
    return json.dumps(found, separators=(",", ":")).replace('{"norm 1 input"', '\n{"norm 1 input"') + "\n"


def main(out: Annotated[Path, typer.Option(help="file to write")] = RECORD, seed: int = 0) -> None:
    """Run SmolLM2-135M on the corpus and write what its activations look like and what few bits do to its gradient."""
    torch.set_num_threads(1)
    model, tokenizer = load_smollm2()
    found = {
        "model": "SmolLM2-135M-Instruct, 4-bit weights dequantised to float32",
        "command": COMMAND,
        "seed": seed,
        "settings": SIZES,
        "kinds": KINDS,
        **record(model, *batch_of(tokenizer, seed)),
        "hardware": results.hardware(),
        "versions": results.versions(),
    }
    results.write_text(out, as_text(found))
    text = f"loss {found['loss']} nats a token, error of the gradient {found['gradient']['fp4']['layers'][0]:.1%}"
    Console().print(f"{text}; written to {out}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
