"""The corpus is the text that it should be; batches depend on seed and step alone."""

import pytest
import torch

from dist_lib.tasks import BatchSampler, CorpusError, corpus, load_corpus


def test_the_corpus_is_text_split_by_file():
    text = load_corpus()
    assert text.train.dtype == torch.uint8 and len(text.train) > 5_000_000
    assert 0.02 < len(text.val) / len(text.train) < 0.10
    assert "import" in bytes(text.val[:100_000].tolist()).decode("utf-8", "replace")


def test_another_text_is_refused(monkeypatch):
    load_corpus.cache_clear()
    monkeypatch.setattr(corpus, "SHA256", "0" * 64)
    with pytest.raises(CorpusError, match="force-reinstall"):
        load_corpus()
    monkeypatch.setattr(corpus, "VERSION", "1.0")
    with pytest.raises(CorpusError, match="make setup"):
        load_corpus()
    load_corpus.cache_clear()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_shards_are_the_global_batch(world_size):
    sampler = BatchSampler(torch.arange(250, dtype=torch.uint8), batch_size=7, seq_len=5, seed=3)
    shards = [sampler.shard(9, r, world_size) for r in range(world_size)]
    tokens, targets = sampler.batch(9)
    assert torch.equal(torch.cat([s[0] for s in shards]), tokens)
    assert torch.equal(torch.cat([s[1] for s in shards]), targets)
    assert torch.equal(tokens[:, 1:], targets[:, :-1]) and torch.equal(tokens + 1, targets)
    assert all(len(s[0]) for s in shards)
    assert all(t.untyped_storage().nbytes() == t.nbytes for s in shards for t in s)  # none keeps the whole batch alive


def test_steps_and_seeds_differ_and_repeat():
    stream = torch.arange(250, dtype=torch.uint8)
    one, same = (BatchSampler(stream, batch_size=4, seq_len=8, seed=1) for _ in range(2))
    other = BatchSampler(stream, batch_size=4, seq_len=8, seed=2)
    assert torch.equal(one.batch(5)[0], same.batch(5)[0])
    assert not torch.equal(one.batch(5)[0], one.batch(6)[0])
    assert not torch.equal(one.batch(5)[0], other.batch(5)[0])


def test_bad_sizes_are_refused():
    stream = torch.arange(10)
    with pytest.raises(ValueError, match="longer than seq_len"):
        BatchSampler(stream, batch_size=1, seq_len=10)
    with pytest.raises(ValueError, match="every rank needs a row"):
        BatchSampler(stream, batch_size=2, seq_len=3).shard(0, 0, 3)
