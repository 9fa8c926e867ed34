"""The Llama layer of Hugging Face's transformers with its activations encoded.

Only where transformers is installed and has been imported, for otherwise there is no such model. Attention itself runs
through transformers' own functions (eager, sdpa, flash), with its masks and caches.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from dist_lib.agoq.modules import LayerForms, norm_products, out_projection, quantised_mlp

MODULE = "transformers.models.llama.modeling_llama"


def llama_classes() -> list[tuple[type[nn.Module], type[nn.Module]]]:
    """The plain class and the quantised one; empty if no Llama of transformers can exist in this process."""
    return [_classes()] if MODULE in sys.modules else []


@lru_cache(maxsize=1)
def _classes() -> tuple[type[nn.Module], type[nn.Module]]:
    llama: Any = sys.modules[MODULE]

    def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
        """What transformers' own forward does between the projections."""
        q, k, v = (t.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for t in (q, k, v))
        cos, sin = arguments.pop("position_embeddings")
        q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
        cache = arguments.pop("cache", None)
        older = arguments.pop("past_key_values", None)  # the name of the cache in earlier releases
        cache = older if cache is None else cache
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        name = attention.config._attn_implementation
        function = llama.ALL_ATTENTION_FUNCTIONS.get(name, llama.eager_attention_forward)
        dropout = attention.attention_dropout if attention.training else 0.0
        mask = arguments.pop("attention_mask", None)
        out: Tensor = function(attention, q, k, v, mask, dropout=dropout, scaling=attention.scaling, **arguments)[0]
        return out.flatten(2).contiguous()

    class QuantizedLlamaLayer(llama.LlamaDecoderLayer):  # type: ignore[misc, name-defined]
        """As :class:`~dist_lib.agoq.modules.QuantizedDecoderLayer`, with the arguments of transformers."""

        forms: LayerForms

        def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
            """(B, S, D) -> (B, S, D)."""
            attention, forms, x = self.self_attn, self.forms, hidden_states
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = norm_products(self.input_layernorm, projections, x, forms.norm, one_buffer=forms.one_buffer)
            mixed = attend(attention, q, k, v, {**kwargs, "attention_mask": attention_mask})
            del q, k, v  # as names of this frame they would be held through the MLP
            x = x + out_projection(attention.o_proj, mixed, forms.out)
            return x + quantised_mlp(self.post_attention_layernorm, self.mlp, x, forms)

    return llama.LlamaDecoderLayer, QuantizedLlamaLayer
