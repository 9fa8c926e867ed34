"""The worker extension against a small engine that follows vLLM's documented interface.

What the stand-in keeps of vLLM: the extension is appended to the bases of the worker class after a check for names in
common; methods are called by name on every worker; the model is ``worker.model_runner.model``; ``load_weights`` takes
pairs of checkpoint names and tensors, stacks q, k, v and gate, up into fused matrices through each parameter's
``weight_loader`` with a shard id, skips a tied head, and slices for tensor parallelism; vocabularies are padded.
"""

import types
import uuid

import pytest
import torch
from torch import nn

from dist_lib.models import Decoder, DecoderConfig
from dist_lib.pulse import CorruptPatchError, Publisher, StateError, Store
from dist_lib.pulse.engines import llama_name
from dist_lib.pulse.engines_vllm import PulseWorkerExtension
from dist_lib.pulse.store import MissingObjectError

TINY = DecoderConfig(
    vocab_size=40, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, max_seq_len=16, tie_embeddings=True
)
STACKED = (("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
           ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1))  # fmt: skip


class EngineModel(nn.Module):
    """Fused parameters under Hugging Face's names, each with a loader of its own."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, config, rank=0, ranks=1):
        super().__init__()
        self.rank, self.ranks, self.calls = rank, ranks, []
        d, kv, ff = config.d_model // ranks, config.kv_dim // ranks, config.d_ff // ranks
        self.sizes = {"q": d, "k": kv, "v": kv, 0: ff, 1: ff}
        full = config.d_model
        self._add("model.embed_tokens.weight", 64 // ranks, full)  # 40 padded to 64
        self._add("model.norm.weight", full)
        for i in range(config.n_layers):
            at = f"model.layers.{i}."
            self._add(at + "self_attn.qkv_proj.weight", d + 2 * kv, full)
            self._add(at + "self_attn.o_proj.weight", full, d)
            self._add(at + "mlp.gate_up_proj.weight", 2 * ff, full)
            self._add(at + "mlp.down_proj.weight", full, ff)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._add(at + norm + ".weight", full)

    def _add(self, name, *shape):
        *path, last = name.split(".")
        module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        parameter.weight_loader = self._load
        module.register_parameter(last, parameter)

    def _load(self, parameter, loaded, shard=None):
        if shard is not None:
            size, start = self.sizes[shard], 0
            for other in ("q", "k", "v") if isinstance(shard, str) else (0, 1):
                if other == shard:
                    break
                start += self.sizes[other]
            parameter.data[start : start + size].copy_(loaded[self.rank * size : (self.rank + 1) * size])
        elif parameter.shape == loaded.shape:
            parameter.data.copy_(loaded)
        elif parameter.shape[1] == loaded.shape[1]:  # the vocabulary
            rows = parameter.shape[0]
            mine = loaded[self.rank * rows : (self.rank + 1) * rows]
            parameter.data[: len(mine)].copy_(mine)
        else:
            cols = parameter.shape[1]
            parameter.data.copy_(loaded[:, self.rank * cols : (self.rank + 1) * cols])

    def load_weights(self, weights):
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            self.calls.append(name)
            if name.startswith("lm_head."):
                continue
            for fused, part, shard in STACKED:
                if part in name:
                    name = name.replace(part, fused)
                    parameters[name].weight_loader(parameters[name], tensor, shard)
                    break
            else:
                parameters[name].weight_loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


class WorkerBase:
    """Where the worker's methods come from."""


def start(ranks=1, extension=PulseWorkerExtension, quantization=None):
    """Workers as the engine makes them."""

    class Worker(WorkerBase):
        def __init__(self, rank):
            self.device = torch.device("cpu")
            self.vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(quantization=quantization))
            self.model_runner = types.SimpleNamespace(model=EngineModel(TINY, rank, ranks))

        def execute_model(self):
            """What an extension must not be called."""

        def update_weights(self):
            """Newer engines have this one too."""

    for name in dir(extension):
        assert name.startswith("__") or not hasattr(Worker, name), f"{name} conflicts with the worker"
    Worker.__bases__ = (*Worker.__bases__, extension)
    return [Worker(rank) for rank in range(ranks)]


def rpc(workers, method, *args):
    return [getattr(worker, method)(*args) for worker in workers]


def versions(count):
    generator = torch.Generator().manual_seed(4)
    decoder, out = Decoder(TINY, seed=2), []
    for step in range(count):
        cast = {id(p): p.detach().bfloat16() for p in decoder.parameters()}
        out.append({n: cast[id(p)] for n, p in decoder.named_parameters(remove_duplicate=False)})
        with torch.no_grad():
            for name, p in decoder.named_parameters():
                if step != 1 or "k_proj" in name:  # one version changes keys only
                    p.add_(2e-5 * torch.randn(p.shape, generator=generator))
    return out


def fresh(state, rank=0, ranks=1):
    model = EngineModel(TINY, rank, ranks)
    model.load_weights((llama_name(n), t) for n, t in state.items())
    return model.state_dict()


def same(worker, state):
    return all(torch.equal(worker.model_runner.model.state_dict()[n], t) for n, t in state.items())


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4()}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_workers_follow_and_equal_a_fresh_load(url, ranks):
    run, workers = versions(4), start(ranks)
    publisher = Publisher(Store(url), workers=1)
    assert rpc(workers, "pulse_version") == [None] * ranks
    rpc(workers, "pulse_follow", url, None, None, True)
    assert rpc(workers, "pulse_poll") == [None] * ranks
    for version, state in enumerate(run):
        publisher.publish(state)
        found = rpc(workers, "pulse_poll", version)
        assert [f["version"] for f in found] == [version] * ranks == rpc(workers, "pulse_version")
        for rank, worker in enumerate(workers):
            assert same(worker, fresh(state, rank, ranks))
        if version == 0:
            assert found[0]["tensors"] == len(run[0]) and found[0]["previous"] is None
            norms = sum("norm" in name for name in run[0])
            assert found[0]["verified"] == (len(run[0]) - 1 if ranks == 1 else norms)
        if version == 2:
            called = workers[0].model_runner.model.calls[-found[0]["tensors"] :]
            assert sorted(called) == [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)]
    assert rpc(workers, "pulse_poll") == [None] * ranks


def test_a_damaged_version_is_not_loaded(url):
    run, (worker,) = versions(2), start()
    store = Store(url)
    publisher = Publisher(store, workers=1)
    publisher.publish(run[0])
    worker.pulse_follow(url, decoder_names=True)
    worker.pulse_poll()
    before = set(store.names("objects"))
    publisher.publish(run[1])
    for name in set(store.names("objects")) - before:
        store.put(name, store.get(name, 1 << 20)[:-1] + b"\0\0")
    with pytest.raises((CorruptPatchError, MissingObjectError)):
        worker.pulse_poll()
    assert same(worker, fresh(run[0])) and worker.pulse_version() == 0


@pytest.mark.parametrize("fault", ["raises", "writes other bits"])
def test_a_load_that_fails_is_undone(url, fault, monkeypatch):
    run, (worker,) = versions(2), start()
    publisher = Publisher(Store(url), workers=1)
    publisher.publish(run[0])
    worker.pulse_follow(url, decoder_names=True)
    worker.pulse_poll()
    publisher.publish(run[1])
    model = worker.model_runner.model
    load, fails = model.load_weights, [True]

    def wrong(weights):
        pairs = list(weights)
        if not fails:
            return load(pairs)
        fails.clear()
        if fault == "raises":
            load(pairs[: len(pairs) // 2])
            raise ValueError("a name that the model does not know")
        return load([(n, t + 1) if "up_proj" in n else (n, t) for n, t in pairs])

    monkeypatch.setattr(model, "load_weights", wrong)
    with pytest.raises(ValueError if fault == "raises" else StateError, match=r"does not know|do not read back"):
        worker.pulse_poll()
    assert same(worker, fresh(run[0])) and worker.pulse_version() == 0
    assert worker.pulse_poll()["version"] == 1 and same(worker, fresh(run[1]))


def test_misuse_is_explained(url):
    (worker,) = start()
    with pytest.raises(StateError, match="call pulse_follow first"):
        worker.pulse_poll()
    (quantised,) = start(quantization="fp8")
    with pytest.raises(StateError, match="holds weights as fp8"):
        quantised.pulse_follow(url)

    class Clash(PulseWorkerExtension):
        def execute_model(self):
            """A name that the worker has."""

    with pytest.raises(AssertionError, match="conflicts"):
        start(extension=Clash)
