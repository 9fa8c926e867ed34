"""The recorded stream and the study, with a tiny model in place of the real one."""

import json
import types

import pytest
import torch

from dist_lib.models import Decoder, DecoderConfig
from dist_lib.pulse import digest_state
from dist_lib.tasks import Addition, GrpoTrainer, warm_start
from labs.pulse import rl, stream

TINY = DecoderConfig(
    vocab_size=16, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=24, max_seq_len=20, tie_embeddings=True
)
MARKS = "0123456789+=\n"


def tokenizer(text, add_special_tokens):
    assert not add_special_tokens
    return types.SimpleNamespace(input_ids=[2 + MARKS.index(c) for c in text])


@pytest.fixture(scope="module")
def loaded():
    return Decoder(TINY, seed=3), tokenizer


def test_sums_behind_examples():
    task = stream.FewShotSums(tokenizer)
    prompts, answers = task.problems(200, torch.Generator().manual_seed(0))
    assert prompts.shape == (200, task.prompt_len) and answers.shape == (200, 2)
    assert task.reward(prompts, answers).tolist() == [1.0] * 200
    lengths = set()
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        text, said = ("".join(MARKS[t - 2] for t in tokens) for tokens in (prompt, answer))
        shots, _, asked = text.rpartition("\n")
        assert shots == "2+3=5\n4+5=9"
        a, b = asked[:-1].split("+")
        assert said == f"{int(a) + int(b)}\n"[:2]
        lengths.add(len(str(int(a) + int(b))))
    assert lengths == {1, 2}
    assert task.reward(prompts, answers.flip(1)).mean() < 0.2  # 11 stays right
    with pytest.raises(ValueError, match="one token each"):
        stream.FewShotSums(lambda text, add_special_tokens: types.SimpleNamespace(input_ids=[1, 2]))


def test_spread_moves_masters_inside_their_cells(loaded):
    model = Decoder(TINY, seed=3)
    stream.spread(model)
    for p, q in zip(model.parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q.bfloat16())
        if p.ndim == 2:
            assert (p != q.bfloat16().float()).float().mean() > 0.9
    again = Decoder(TINY, seed=3)
    stream.spread(again)
    assert torch.equal(again.norm.weight, model.norm.weight)


@pytest.mark.parametrize(("storage", "start"), [("fp32", "spread"), ("fp32", "loaded"), ("bf16", "spread")])
def test_a_recorded_stream_reads_back_bit_for_bit(loaded, tmp_path, storage, start):
    before = digest_state(loaded[0].state_dict(), workers=1)
    live = list(stream.smollm2_stream(lr=1e-4, storage=storage, steps=4, loaded=loaded, start=start))
    assert [item.version for item in live] == [0, 1, 2, 3, 4] and digest_state(loaded[0].state_dict()) == before
    folder = stream.stream_folder(1e-4, storage, tmp_path, start)
    log = stream.record(1e-4, storage, 4, folder, loaded, start)
    states = list(stream.recorded_stream(folder))
    for item, state in zip(live, states, strict=True):
        assert digest_state(state, workers=1) == digest_state(item.state, workers=1)
        assert state["lm_head.weight"] is state["embed_tokens.weight"]
    found = json.loads(json.dumps(stream.summarise(folder)))
    assert found["steps"] == 4 and found["cells"] == sum(p.numel() for p in loaded[0].parameters())
    assert found["sparsity_by_step"] == pytest.approx([1 - step["density"] for step in log])
    assert set(found["sparsity_to_end"]) == {"1", "2", "4"} and found["sparsity_to_end"]["4"] < 1
    assert sum(e["changed"] for e in found["exponents"]) == found["changed"] > 0
    assert sum(e["cells"] for e in found["exponents"]) == found["cells"]
    assert "lm_head.weight" not in found["density_by_tensor"] and "layers.0" in found["density_by_layer"]
    stream.record(1e-4, storage, 2, folder, loaded, start)
    assert len(list(stream.recorded_stream(folder))) == 3  # what was there is replaced


def test_wrong_starts_and_missing_streams_are_explained(loaded, tmp_path):
    with pytest.raises(ValueError, match="spread or loaded"):
        next(stream.smollm2_stream(lr=1e-6, storage="fp32", steps=1, loaded=loaded, start="zero"))
    with pytest.raises(FileNotFoundError, match=r"python -m labs\.pulse\.stream"):
        next(stream.recorded_stream(tmp_path))


def started():
    """A small model that is right often enough for rewards to differ."""
    model = Decoder(Addition(1).model_config(d_model=32, n_layers=1, d_ff=64), seed=1)
    warm_start(model, Addition(1), steps=100, batch_size=64, lr=5e-3)
    return model


def test_a_short_study_run(monkeypatch, tmp_path):
    assert len(rl.cases()) == len({case.name for case in rl.cases(3)}) / 3 == 10
    cases = [rl.Case(o, s, 3e-5, 0) for o in ("adamw", "muon") for s in ("bf16", "fp32")]
    monkeypatch.setattr(rl, "cases", lambda seeds: cases)
    monkeypatch.setattr(rl, "KS", (1, 2))
    monkeypatch.setattr(rl, "TASK", Addition(1))
    small = started()
    ran = []

    def short(case, start, **_):
        ran.append(case.name)
        return run(case, start, steps=3, config={"prompts": 2, "samples": 4})

    run = rl.run_case
    monkeypatch.setattr(rl, "warm_model", lambda seed: small)
    monkeypatch.setattr(rl, "run_case", short)
    out, told = tmp_path / "record.json", []
    record = rl.study(out, told.append)
    assert ran == [case.name for case in cases] and len(told) == 4 and json.loads(out.read_text()) == record
    assert rl.study(out, told.append) == record and len(ran) == 4  # nothing is missing
    table = rl.rows(record)
    assert [(r["optimizer"], r["storage"]) for r in table] == [
        ("adamw", "bf16"), ("adamw", "fp32"), ("muon", "bf16"), ("muon", "fp32")]  # fmt: skip
    for row in table:
        assert 0 < row["S2"] <= row["S1"] < 100 and row["moved"] > 0
        assert (row["crossing_model"] is None) == (row["storage"] == "bf16")
        if row["storage"] == "fp32":
            assert abs(row["crossing_model"] - row["S1"]) < 1.5


def test_sparsity_of_a_study_run_is_that_of_the_acting_weights(monkeypatch):
    monkeypatch.setattr(rl, "TASK", Addition(1))
    small = started()
    case = rl.Case("adamw", "fp32", 1e-4, 0)
    found = rl.run_case(case, small, steps=2, config={"prompts": 2, "samples": 4})
    settings = rl.GrpoConfig(lr=1e-4, warmup_steps=rl.WARMUP, prompts=2, samples=4)
    trainer, casts = GrpoTrainer(small, rl.TASK, settings), []
    for step in range(2):
        casts.append(trainer.weights())
        trainer.step(rl.sample_rollouts(trainer.acting, rl.TASK, settings, step=step, version=step))
    casts.append(trainer.weights())
    for step, value in enumerate(found["by_step"]):
        names = [n for n in casts[0] if n != "lm_head.weight"]
        changed = sum(int((casts[step][n] != casts[step + 1][n]).sum()) for n in names)
        assert value < 100 and value == pytest.approx(100 - 100 * changed / sum(casts[0][n].numel() for n in names))
