"""Live models follow a store in place: same storage, same bits as a fresh load, and the old weights on any failure."""

import uuid

import pytest
import torch

from dist_lib.models import Decoder, DecoderConfig, copy_llama
from dist_lib.pulse import CorruptPatchError, Publisher, Retry, StateError, Store, Subscriber, digest_state
from dist_lib.pulse.engines import ModelReceiver, llama_name
from dist_lib.pulse.store import MissingObjectError

TINY = DecoderConfig(
    vocab_size=40, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=24, max_seq_len=16, tie_embeddings=True
)
TOKENS = torch.arange(12).view(2, 6)


def memory():
    return Store(f"memory://{uuid.uuid4()}", retry=Retry(attempts=1, sleep=lambda s: None))


def versions(count, config=TINY):
    """Bfloat16 states of a decoder whose weights drift; tied names share storage."""
    generator = torch.Generator().manual_seed(4)
    decoder, out = Decoder(config, seed=2), []
    for _ in range(count):
        cast = {id(p): p.detach().bfloat16() for p in decoder.parameters()}
        out.append({n: cast[id(p)] for n, p in decoder.named_parameters(remove_duplicate=False)})
        with torch.no_grad():
            for p in decoder.parameters():
                p.add_(2e-5 * torch.randn(p.shape, generator=generator))
    return out


def llama(config=TINY, dtype=torch.bfloat16):
    transformers = pytest.importorskip("transformers")
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_embeddings,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(shape).to(dtype).eval()


def served(model):
    return digest_state(model.state_dict(), workers=1).whole


def expected(state, config=TINY, dtype=torch.bfloat16):
    """A model that loads the state afresh."""
    model = llama(config, dtype)
    model.load_state_dict({llama_name(n): t for n, t in state.items()})
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hugging_face_model_follows_in_place(dtype):
    run, store = versions(6), memory()
    publisher = Publisher(store, anchor_every=3, workers=1)
    model = llama(dtype=dtype)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    pointers = {n: p.data_ptr() for n, p in model.named_parameters(remove_duplicate=False)}
    receiver = ModelReceiver(model, Subscriber(store, workers=1), rename=llama_name)
    before = served(model)
    assert receiver.poll() is None and receiver.version is None and served(model) == before
    for version, state in enumerate(run):
        publisher.publish(state)
        found = receiver.poll()
        assert (found.previous, found.version) == (version - 1 if version else None, version)
        fresh = expected(state, dtype=dtype)
        assert served(model) == served(fresh) and receiver.poll() is None
        assert torch.equal(model(TOKENS).logits, fresh(TOKENS).logits)
        cells = sum(p.numel() for p in model.parameters())
        assert found.cells == cells if version == 0 else 0 < found.cells < cells
    assert {n: p.data_ptr() for n, p in model.named_parameters(remove_duplicate=False)} == pointers
    assert model.lm_head.weight is model.model.embed_tokens.weight
    decoder = Decoder(TINY)
    copy_llama({n: t.float() for n, t in model.state_dict().items()}, decoder)
    assert all(torch.equal(p.bfloat16(), run[-1][n]) for n, p in decoder.named_parameters())


def test_a_receiver_that_lags_or_starts_late_ends_at_the_same_bits():
    run, store = versions(7), memory()
    publisher = Publisher(store, anchor_every=4, workers=1)
    models = [llama() for _ in range(3)]
    receivers = [ModelReceiver(m, Subscriber(store, workers=1), rename=llama_name) for m in models]
    for version, state in enumerate(run):
        publisher.publish(state)
        receivers[0].poll()
        if version % 3 == 0:
            receivers[1].poll()
    receivers[2].poll(most=5)
    assert served(models[2]) == served(expected(run[5]))
    for model, receiver in zip(models, receivers, strict=True):
        receiver.poll()
        assert served(model) == served(expected(run[6])) and receiver.version == 6


def test_a_failed_verification_leaves_the_old_weights_serving():
    run, store = versions(3), memory()
    publisher = Publisher(store, anchor_every=9, workers=1)
    publisher.publish(run[0])
    model = llama()
    receiver = ModelReceiver(model, Subscriber(store, workers=1), rename=llama_name)
    receiver.poll()
    old, logits = served(model), model(TOKENS).logits
    before = set(store.names("objects"))
    publisher.publish(run[1])
    broken = {n: store.get(n, 1 << 20) for n in set(store.names("objects")) - before}
    for name, data in broken.items():
        store.put(name, data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    with pytest.raises((CorruptPatchError, MissingObjectError)):
        receiver.poll()
    assert receiver.version == 0 and served(model) == old and torch.equal(model(TOKENS).logits, logits)
    for name, data in broken.items():
        store.put(name, data)
    assert receiver.poll().version == 1 and served(model) == served(expected(run[1]))


def test_a_write_that_fails_half_way_is_undone(monkeypatch):
    run, store = versions(2), memory()
    publisher = Publisher(store, workers=1)
    publisher.publish(run[0])
    model = llama()
    receiver = ModelReceiver(model, Subscriber(store, workers=1), rename=llama_name)
    receiver.poll()
    publisher.publish(run[1])
    old, calls = served(model), []
    from dist_lib.pulse import engines

    put = engines._put

    def fails(write, values):
        calls.append(write.name)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        put(write, values)

    monkeypatch.setattr(engines, "_put", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        receiver.poll()
    assert len(calls) == 4 and served(model) == old and receiver.version == 0
    monkeypatch.setattr(engines, "_put", lambda write, values: put(write, values * 2))
    monkeypatch.setattr(engines, "_holds", lambda write: False)
    with pytest.raises(StateError, match="do not read back"):
        receiver.poll()
    assert served(model) == old and receiver.version == 0
    monkeypatch.undo()
    assert receiver.poll().version == 1 and served(model) == served(expected(run[1]))


def test_what_something_else_wrote_is_healed():
    run, store = versions(2), memory()
    publisher = Publisher(store, workers=1)
    publisher.publish(run[0])
    model = llama()
    receiver = ModelReceiver(model, Subscriber(store, workers=1), rename=llama_name)
    receiver.poll()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0] += 1
    publisher.publish(run[1])
    receiver.poll()
    assert served(model) == served(expected(run[1]))


def test_states_that_do_not_fit_are_refused_before_anything_is_written():
    import dataclasses

    run = versions(1)
    untied = dataclasses.replace(TINY, tie_embeddings=False)
    apart = {**run[0], "lm_head.weight": run[0]["lm_head.weight"] + 1}
    longer = {**run[0], "norm.weight": torch.ones(17).bfloat16()}
    cases = [
        (run[0], llama(), None, "differ in names"),
        ({**run[0], "more": torch.ones(1)}, llama(), llama_name, "differ in names"),
        (longer, llama(), llama_name, "published as torch.bfloat16 .17"),
        ({n: t.float() for n, t in run[0].items()}, llama(), llama_name, "wider"),
        (apart, llama(), llama_name, "share storage in the model"),
    ]
    for state, model, rename, message in cases:
        store = memory()
        Publisher(store, workers=1).publish(state)
        before = served(model)
        with pytest.raises(StateError, match=message):
            ModelReceiver(model, Subscriber(store, workers=1), rename=rename).poll()
        assert served(model) == before
    store = memory()
    Publisher(store, workers=1).publish(apart)  # a model that does not tie them can take both
    model = llama(untied)
    ModelReceiver(model, Subscriber(store, workers=1), rename=llama_name).poll()
    assert torch.equal(model.lm_head.weight, apart["lm_head.weight"])
