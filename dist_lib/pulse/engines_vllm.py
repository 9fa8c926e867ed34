"""Into vLLM: a worker extension that follows a store and loads what changed through the model's own loader.

vLLM is not needed to import this, and no part of it is patched. Give the engine the extension by name, and call its
methods on all workers::

    llm = LLM(model, worker_extension_cls="dist_lib.pulse.engines_vllm.PulseWorkerExtension")
    llm.collective_rpc("pulse_follow", args=("s3://bucket/run",))
    llm.collective_rpc("pulse_poll")      # between two batches, then:
    llm.reset_prefix_cache()              # cached keys and values are of the old weights

vLLM adds the extension to the bases of its worker class, so ``self.model_runner.model`` is the model of this worker and
``load_weights`` takes pairs of checkpoint names and tensors; stacked matrices (``qkv_proj``, ``gate_up_proj``) and
slices of tensor-parallel workers are the loader's business. Every worker holds one copy of the published state on the
CPU. Methods begin with ``pulse_``, because vLLM refuses an extension whose names its worker has already. This was
tested against a small model that follows the documented interface, not against vLLM itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_lib.pulse.engines import llama_name
from dist_lib.pulse.errors import StateError
from dist_lib.pulse.state import as_words, find_ties
from dist_lib.pulse.store import Store
from dist_lib.pulse.subscriber import Subscriber


class PulseWorkerExtension:
    """Methods that every vLLM worker gains; arguments and results are plain values that travel between processes."""

    def pulse_follow(
        self,
        url: str,
        options: dict[str, Any] | None = None,
        public_key: bytes | None = None,
        decoder_names: bool = False,
    ) -> None:
        """Start to follow a store; nothing is loaded yet.

        Args:
            url: of the store.
            options: for its file system.
            public_key: of the publisher; None accepts unsigned versions.
            decoder_names: whether names are those of the book's decoder and not of a Hugging Face Llama.

        Raises:
            StateError: the engine quantises its weights, so that loading changes of them would be wrong.
        """
        quantisation = getattr(getattr(self._pulse_config(), "model_config", None), "quantization", None)
        if quantisation is not None:
            raise StateError(
                f"this engine holds weights as {quantisation}: publish quantised tensors (dist_lib.pulse.fp8) "
                f"and patch those, or start the engine without quantisation"
            )
        self._pulse_names = llama_name if decoder_names else str
        self._pulse_subscriber = Subscriber(Store(url, options or {}), public_key=public_key)
        self._pulse_served: Mapping[str, Tensor] = {}
        self._pulse_served_version: int | None = None

    def pulse_version(self) -> int | None:
        """The version that this worker serves; None for the weights that the engine started with."""
        return getattr(self, "_pulse_served_version", None)

    def pulse_poll(self, most: int | None = None) -> dict[str, Any] | None:
        """Load the newest version that can be reached; None if it is served already.

        Args:
            most: do not go beyond this version, so that all workers end at the same one; None for no limit.

        Returns:
            ``version``, ``previous``, ``tensors`` loaded, ``verified`` of them by reading back, and ``seconds``.

        Raises:
            StateError: :meth:`pulse_follow` was not called; or tensors do not read back, and the old ones were loaded
                again.
            CorruptPatchError, MissingObjectError, OSError: see :meth:`dist_lib.pulse.Subscriber.poll`; nothing was
                loaded.
        """
        start = time.monotonic()
        subscriber: Subscriber | None = getattr(self, "_pulse_subscriber", None)
        if subscriber is None:
            raise StateError("this worker follows no store yet; call pulse_follow first")
        subscriber.poll(most=most)
        state, version = subscriber.state, subscriber.version
        if state is None or version is None or version == self._pulse_served_version:
            return None
        changed = [name for name, tensor in state.items() if self._pulse_served.get(name) is not tensor]
        try:
            self._pulse_load(state, changed)
            verified = self._pulse_verify(state, changed)
        except Exception:
            if self._pulse_served:
                self._pulse_load(self._pulse_served, [n for n in changed if n in self._pulse_served])
            raise
        previous, self._pulse_served, self._pulse_served_version = self._pulse_served_version, state, version
        seconds = time.monotonic() - start
        found = {"version": version, "previous": previous, "tensors": len(changed)}
        return {**found, "verified": verified, "seconds": seconds}

    def _pulse_config(self) -> Any:
        return getattr(self, "vllm_config", None)

    def _pulse_model(self) -> Any:
        return self.model_runner.model  # type: ignore[attr-defined]  # of the worker that this class becomes a base of

    def _pulse_load(self, state: Mapping[str, Tensor], names: Iterable[str]) -> None:
        device = getattr(self, "device", None)
        with torch.no_grad():
            self._pulse_model().load_weights((self._pulse_names(n), state[n].to(device)) for n in names)

    def _pulse_verify(self, state: Mapping[str, Tensor], names: list[str]) -> int:
        """Compare what the model holds with what was loaded, where it holds it whole; returns how many tensors."""
        model = self._pulse_model()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        stacked = {p: (k, v) for k, v in getattr(model, "packed_modules_mapping", {}).items() for p in v if len(v) > 1}
        ties = find_ties(state)
        verified, torn = 0, []
        for name in names:
            if name in ties:
                continue
            held = _held(self._pulse_names(name), state, name, parameters, stacked)
            if held is None:
                continue
            verified += 1
            if not np.array_equal(as_words(held), as_words(state[name].to(held.dtype))):
                torn.append(name)
        if torn:
            raise StateError(f"{sorted(torn)[:5]} do not read back as loaded; the old weights were loaded again")
        return verified


def _held(
    engine_name: str,
    state: Mapping[str, Tensor],
    name: str,
    parameters: Mapping[str, Tensor],
    stacked: Mapping[str, tuple[str, list[str]]],
) -> Tensor | None:
    """The part of the model's parameters that a published tensor became; None where this worker has but a slice."""
    tensor, offset, total = state[name], 0, state[name].shape[0] if state[name].ndim else 1
    for part, (whole, parts) in stacked.items():
        if f".{part}." in engine_name:
            sizes = {p: state[name.replace(f".{part}.", f".{p}.")].shape[0] for p in parts}
            offset, total = sum(sizes[p] for p in parts[: parts.index(part)]), sum(sizes.values())
            engine_name = engine_name.replace(f".{part}.", f".{whole}.")
            break
    held = parameters.get(engine_name)
    if held is None or held.ndim != tensor.ndim or held.shape[1:] != tensor.shape[1:] or held.shape[0] < total:
        return None
    padded = held.shape[0] > total  # vocabularies are padded at their end; anything else is another layout
    if padded and "embed" not in engine_name and "lm_head" not in engine_name:
        return None
    return held[offset : offset + tensor.shape[0]]
