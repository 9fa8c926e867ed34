"""Matrices of models by name: what is to be owned, as names and shapes without any weights.

Decoders come from :data:`dist_lib.models.CONFIGS`. Two vision-language-action models that the paper measures are added
by their matrices alone: WallX from the shapes that its authors profiled, Pi0 rebuilt by us from the public
configurations of its parts (PaliGemma-2B, a 300M expert, SigLIP); see their counts before relying on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dist_lib.dmuon.plan import MatrixSpec
from dist_lib.models import CONFIGS, DecoderConfig

_Block = tuple[int, Mapping[str, tuple[int, int]]]


def decoder_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Names and shapes of the hidden matrices of one decoder layer, within the layer."""
    d, kv, ff = config.d_model, config.kv_dim, config.d_ff
    return {
        "self_attn.q_proj.weight": (d, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, d),
        "mlp.gate_proj.weight": (ff, d),
        "mlp.up_proj.weight": (ff, d),
        "mlp.down_proj.weight": (d, ff),
    }


def _attention(width: int, inner: int, kv: int, ff: int) -> dict[str, tuple[int, int]]:
    return {
        "q.weight": (inner, width),
        "k.weight": (kv, width),
        "v.weight": (kv, width),
        "o.weight": (width, inner),
        "gate.weight": (ff, width),
        "up.weight": (ff, width),
        "down.weight": (width, ff),
    }


_EXTRA: Mapping[str, Mapping[str, _Block]] = MappingProxyType(
    {
        "wallx": {
            "layers": (
                36,
                {
                    "qkv.weight": (2560, 2048),
                    "o.weight": (2048, 2048),
                    "gate_up.weight": (22_016, 2048),
                    "down.weight": (2048, 11_008),
                    "action.qkv.weight": (2560, 1024),
                    "action.o.weight": (1024, 1024),
                    "action.gate_up.weight": (4096, 1024),
                    "action.down.weight": (1024, 2048),
                },
            ),
            "visual.blocks": (
                32,
                {
                    "qkv.weight": (3840, 1280),
                    "proj.weight": (1280, 1280),
                    "gate_up.weight": (6912, 1280),
                    "down.weight": (1280, 3456),
                },
            ),
            "visual.merger": (1, {"linear.weight": (5120, 5120)}),
        },
        "pi0": {
            "language.layers": (18, _attention(2048, 2048, 256, 16_384)),
            "expert.layers": (18, _attention(1024, 2048, 256, 4096)),
            "vision.layers": (
                27,
                {
                    "q.weight": (1152, 1152),
                    "k.weight": (1152, 1152),
                    "v.weight": (1152, 1152),
                    "o.weight": (1152, 1152),
                    "fc1.weight": (4304, 1152),
                    "fc2.weight": (1152, 4304),
                },
            ),
        },
    }
)
WORKLOADS: tuple[str, ...] = (*CONFIGS, *_EXTRA)


def workload(name: str) -> tuple[MatrixSpec, ...]:
    """All hidden matrices of a model.

    Raises:
        KeyError: listing the names that exist.
    """
    if name in CONFIGS:
        config = CONFIGS[name]
        blocks: Mapping[str, _Block] = {"layers": (config.n_layers, decoder_shapes(config))}
    elif name in _EXTRA:
        blocks = _EXTRA[name]
    else:
        raise KeyError(f"no model is named {name!r}; there are {', '.join(WORKLOADS)}")
    return tuple(
        MatrixSpec(f"{prefix}.{layer}.{part}", shape)
        for prefix, (layers, parts) in blocks.items()
        for layer in range(layers)
        for part, shape in parts.items()
    )


def shape_counts(matrices: Sequence[MatrixSpec]) -> dict[tuple[int, ...], int]:
    """How many matrices there are of each shape, largest shapes first."""
    found: dict[tuple[int, ...], int] = {}
    for m in matrices:
        found[m.shape] = found.get(m.shape, 0) + 1
    return dict(sorted(found.items(), key=lambda item: (-item[0][0] * item[0][1], item[0])))
