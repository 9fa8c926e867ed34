"""The memory model: the paper's tables, published numbers, what layers really keep, and what would fit."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from dist_lib.agoq import ActivationPlan, quantize_activations
from dist_lib.agoq.bit_plan import RULES, BudgetError
from dist_lib.agoq.layer_memory import (
    LAYOUTS,
    TABLE_1_SHAPE,
    LayerShape,
    by_column,
    layer_cost,
    layer_units,
    statistics_bytes,
    tensors,
)
from dist_lib.agoq.memory_model import (
    SYSTEM_NAMES,
    SYSTEMS,
    System,
    Training,
    fewest_recomputed,
    fits,
    longest_sequence,
    peak,
    plan_bits,
    stage_memory,
)
from dist_lib.agoq.paper_tables import A6000, layer_table, memory_table, recompute_table, saving_table
from dist_lib.agoq.published import INCONSISTENCIES, TABLE_1_TOTALS, TABLE_2, TABLE_5, TABLE_6, TABLE_14_SAVED
from dist_lib.agoq.speed_model import published_speed, speed_table
from dist_lib.models import CONFIGS, Decoder, DecoderConfig, SavedTensorCounter, get_config, parameter_counts
from dist_lib.models.decoder import rotary_table
from dist_lib.step_model import activation_layer_units

LLAMA3 = get_config("llama3-8b")
GPU = 80 * 2**30


def training(**changes):
    return Training(**({"config": LLAMA3, "seq": 32 * 1024, "tensor": 8, "stages": 4} | changes))


# ---- table 1 ------------------------------------------------------------------------------------------------------


def test_table_1_exactly():
    rows = layer_table()
    assert len(rows) == 21 and all(r.error == 0 for r in rows)
    for layout, total in TABLE_1_TOTALS.items():
        assert sum(r.counted for r in rows if r.layout == layout) == Fraction(total)
        assert layer_units(layout, TABLE_1_SHAPE) == Fraction(total)


@pytest.mark.parametrize(
    ("model", "bf16", "four_bits"),
    [
        ("llama2-7b", 22.75, 7.09375),
        ("llama2-13b", 22.8, 7.1),
        ("llama3-8b", 23.75, 5.25),
        ("codellama-34b", 20.125, 4.46875),
        ("olmo-1b", 28.0, 7.75),
    ],
)
def test_real_shapes(model, bf16, four_bits):
    shape = LayerShape.of(get_config(model))
    assert float(layer_units("bf16", shape)) == pytest.approx(bf16)
    assert float(layer_units("table1", shape)) == pytest.approx(four_bits)
    assert activation_layer_units(get_config(model)) == pytest.approx(bf16)  # the short form used elsewhere
    assert activation_layer_units(get_config(model), quantised_bits=4) == pytest.approx(four_bits)


def test_what_the_table_hides():
    quarter = Fraction(1, 4)  # a float32 scale for 128 numbers
    assert float(layer_units("table1", TABLE_1_SHAPE, scale_bits=quarter)) == pytest.approx(7.92, abs=0.005)
    assert layer_units("paper", TABLE_1_SHAPE) == Fraction("8.75")
    assert layer_units("shared", TABLE_1_SHAPE) == Fraction("6.5")
    assert float(layer_units("shared", TABLE_1_SHAPE, scale_bits=quarter)) == pytest.approx(6.66, abs=0.005)
    grouped = LayerShape(Fraction(7, 2), Fraction(1, 4))
    assert float(layer_units("shared", grouped, scale_bits=quarter)) == pytest.approx(4.89, abs=0.005)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_costs_and_tensors_are_one_count(layout):
    shape = LayerShape(Fraction(7, 2), Fraction(1, 8))
    for bits in (4, 5, 8, 16):
        total = layer_units(layout, shape, bits=bits, scale_bits=1)
        assert total == sum(by_column(layout, shape, bits=bits, scale_bits=1).values())
        assert total == layer_cost(layout, shape, scale_bits=1).at(bits)
    assert len({h.name for h in tensors(layout, shape)}) == len(tensors(layout, shape))


@pytest.mark.parametrize(
    ("layout", "codec", "bits"), [("paper", "fp4", 4), ("shared", "fp4", 4), ("shared", "int6", 6)]
)
def test_layers_keep_what_is_counted(layout, codec, bits):
    config = DecoderConfig(vocab_size=64, d_model=256, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=640, max_seq_len=256)
    model = Decoder(config).bfloat16()
    quantize_activations(model, ActivationPlan(codec, 128, layout=layout))
    batch, seq = 2, 128
    cos, sin = rotary_table(config, seq, torch.device("cpu"))
    x = torch.randn(batch, seq, 256).bfloat16().requires_grad_()
    with SavedTensorCounter(model) as counter:
        model.layers[0](x, cos, sin)
    unit = 2 * batch * seq * 256
    counted = layer_units(layout, LayerShape.of(config), bits=bits, scale_bits=Fraction(32, 128)) * unit
    constants = 4 * seq * config.head_dim * 2  # rotary tables, which all layers share
    assert counter.bytes == pytest.approx(float(counted) + statistics_bytes(config, batch * seq) + constants, rel=0.002)


# ---- tables 2, 8, 14 ----------------------------------------------------------------------------------------------


def test_absolute_memory_against_the_paper():
    rows = {(r.row.place, r.row.systems): r for r in memory_table()}
    assert len(rows) == 12
    expected = {"bf16": (44.0, 47.2), "o": (34.2, 37.5), "og": (29.4, 32.7), "aog": (19.5, 19.9)}
    for systems, (own, wide) in expected.items():
        row = rows["table 8, GPU", systems]
        assert (row.modelled, row.table_1_shape) == (pytest.approx(own, abs=0.1), pytest.approx(wide, abs=0.1))
        assert abs(row.error) < 0.20
        assert rows["table 8, NPU", systems].modelled == row.modelled
    for place in TABLE_14_SAVED:
        assert all(abs(rows[place, s].error) < 0.20 for s in ("bf16", "aog"))
    # An NPU's peaks lie 20 to 34 percent above the model: something else lives there, and what is saved agrees (below).
    assert all(-0.35 < rows["table 8, NPU", s].error < -0.2 for s in expected)
    assert rows["table 8, GPU", "aog"].built > rows["table 8, GPU", "aog"].modelled + 0.5  # the copy that stays, scales


def test_what_each_technique_saves():
    rows = {(r.place, r.technique): r for r in saving_table()}
    for place in ("table 8, GPU", "table 8, NPU"):
        assert rows[place, "O"].modelled == pytest.approx(9.7, abs=0.1)
        assert rows[place, "G"].modelled == pytest.approx(4.8, abs=0.1)
        assert rows[place, "A"].modelled == pytest.approx(9.9, abs=0.1)
        assert abs(rows[place, "all"].error) < 0.05
    for technique in "OGA":
        assert abs(rows["table 8, NPU", technique].error) < 0.1
    # 2.4 GB on a GPU are half of what float32 to 8 bits gives for the parameters of a rank.
    assert rows["table 8, GPU", "G"].error == pytest.approx(1.0, abs=0.05)
    assert rows["table 8, GPU", "all"].published_share == pytest.approx(0.516, abs=0.0005)
    for place, share in TABLE_14_SAVED.items():
        assert rows[place, "all"].published_share == pytest.approx(share, abs=0.005)
        assert rows[place, "all"].modelled_share == pytest.approx(share, abs=0.05)


def test_layer_times_add_up():
    for table in (TABLE_5, TABLE_6):
        assert sum(table.baseline_ms) == pytest.approx(table.baseline_total_ms)
        assert sum(table.agoq_ms) == pytest.approx(table.agoq_total_ms)


@pytest.mark.parametrize(("against", "first"), [("megatron", 0.054), ("zero1", 0.036)])
def test_the_factor_behind_1_34(against, first):
    speed, rows = published_speed(), speed_table(against=against)
    assert speed.forward_share == pytest.approx(0.369, abs=0.0005)
    assert speed.overhead == pytest.approx(1.0237, abs=0.0001)
    assert rows[0].error == pytest.approx(first, abs=0.001)
    assert all(abs(r.error) < 0.025 for r in rows[1:])
    for r in rows:
        printed = r.row.speedup if against == "megatron" else r.row.zero1_speedup
        assert r.measured == pytest.approx(printed, abs=0.0101)
    assert rows[-1].modelled == pytest.approx(1.337, abs=0.001)
    assert speed.speedup(0, 10) < 1 and speed.worth_it(10) == 1 and speed.worth_it(100) == 7


def test_speed_errors():
    with pytest.raises(ValueError, match="allowed are megatron, zero1"):
        speed_table(against="deepspeed")
    with pytest.raises(ValueError, match="11 of 10 layers"):
        published_speed().speedup(11, 10)


def test_recomputation_from_memory_alone():
    rows = recompute_table()
    assert [r.recomputed for r in rows] == [3, 4, 6, 6, 7, 7, 8]
    assert [r.row.megatron_recomputed for r in rows] == [3, 4, 6, 8, 8, 10, 10]
    assert all(abs(r.error) < 0.07 for r in rows)
    assert all(r.agoq_gb < 48 * 2**30 / 1e9 for r in rows)  # what the paper runs without recomputing does fit
    assert len(rows) == len(TABLE_2) and A6000 < 48 * 2**30
    assert recompute_table(2**30)[0].recomputed is None


def test_inconsistencies_say_where_and_what():
    assert len({i.place + i.printed for i in INCONSISTENCIES}) == len(INCONSISTENCIES) >= 10
    assert all(i.place and i.printed and i.found for i in INCONSISTENCIES)


# ---- the model itself ---------------------------------------------------------------------------------------------


def test_bytes_of_a_parameter():
    def total(name, data=1):
        return float(sum(SYSTEMS[name].parameter_bytes(data).values()))

    assert total("bf16") == 18 and total("zero1", 1) == 18 and total("zero1", 8) == 6 + 12 / 8
    assert total("o") == 12 + 8 / 256 and total("og") == 9 + 8 / 256 + 4 / 128
    assert set(SYSTEMS) == set(SYSTEM_NAMES)


@pytest.mark.parametrize("model", CONFIGS)
def test_every_parameter_has_a_stage(model):
    config = CONFIGS[model]
    whole = Training(config=config, seq=1024)
    assert whole.parameters(0) == parameter_counts(config).total
    if config.n_layers % 2 == 0:
        halves = replace(whole, stages=2)
        copies = parameter_counts(config).embedding if config.tie_embeddings else 0
        assert halves.parameters(0) + halves.parameters(1) == whole.parameters(0) + copies


def test_stages_hold_what_they_should():
    stages = stage_memory(training(micro_batches=8, chunks=2), SYSTEMS["bf16"])
    assert [m.in_flight for m in stages] == [11, 9, 7, 5] and all(m.bits == () for m in stages)
    unit = 2 * 32 * 1024 * 4096 // 8
    assert stages[1].parts["activations"] == pytest.approx(9 * 4 * 23.75 * unit, rel=0.003)  # statistics: 0.1 %
    assert stages[0].parts["head"] == 0 < stages[3].parts["head"] == 32 * 1024 * 128_256 * 6 // 8 + 2 * unit
    assert stages[0].parts["weights"] > stages[1].parts["weights"] == stages[2].parts["weights"]
    assert all(m.total == sum(m.parts.values()) for m in stages)
    assert peak(stages) is stages[0]


def test_logits_can_set_the_peak():
    stages = stage_memory(training(tensor=1, stages=16, micro_batches=4), SYSTEMS["shared"])
    assert peak(stages).stage == 15 and peak(stages).parts["head"] > peak(stages).parts["activations"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", ["paper", "shared"])
@pytest.mark.parametrize("pipeline", [(4, 8, 2), (4, 8, 1), (8, 16, 1), (16, 16, 1)])
def test_no_budget_plan_raises_the_peak(rule, layout, pipeline):
    stages, micro_batches, chunks = pipeline
    t = training(stages=stages, micro_batches=micro_batches, chunks=chunks)
    system = replace(SYSTEMS[layout], rule=rule)
    four = peak(stage_memory(t, SYSTEMS[layout])).total
    planned = peak(stage_memory(t, system)).total
    plan = plan_bits(t, system)
    assert plan is not None
    if rule == "budget":
        assert planned <= four + 6  # every kind is rounded to a byte
        plan.check_peak(
            t.cost(system), [m.total - m.parts["activations"] for m in stage_memory(t, system)], budget=four
        )
    if rule == "release" and chunks == 2:
        assert planned > four  # it goes by layers, and interleaving gives every stage some of each kind


def test_the_budget_may_be_the_gpus():
    t, system = training(), replace(SYSTEMS["shared"], rule="budget")
    four = peak(stage_memory(t, SYSTEMS["shared"])).total
    (first, *_), ample = stage_memory(t, system, budget=four + 2**30), stage_memory(t, system, budget=GPU)
    assert first.bits[0] > 4 and first.total <= four + 2**30
    assert all(m.bits == (16,) for m in ample)
    with pytest.raises(BudgetError, match="stage 0"):
        stage_memory(t, system, budget=four - 2**20)


def test_longest_sequence_is_where_it_stops_fitting():
    for name, system in SYSTEMS.items():
        longest = longest_sequence(training(), system, GPU)
        assert longest % 1024 == 0 and fits(replace(training(), seq=longest), system, GPU), name
        assert not fits(replace(training(), seq=longest + 1024), system, GPU), name
    assert longest_sequence(training(), SYSTEMS["shared"], GPU) > 3 * longest_sequence(training(), SYSTEMS["bf16"], GPU)
    assert longest_sequence(training(), SYSTEMS["bf16"], 2**30) == 0
    assert longest_sequence(training(), SYSTEMS["bf16"], GPU, most=4096) == 4096


def test_recomputing_until_it_fits():
    t, small = training(seq=64 * 1024), 40 * 2**30
    layers = fewest_recomputed(t, SYSTEMS["bf16"], small)
    assert 0 < layers <= 8
    assert peak(stage_memory(t, SYSTEMS["bf16"], recomputed=layers)).total <= small
    assert peak(stage_memory(t, SYSTEMS["bf16"], recomputed=layers - 1)).total > small
    assert fewest_recomputed(t, SYSTEMS["bf16"], 2**30) is None
    with pytest.raises(ValueError, match="a stage has 8 layers"):
        stage_memory(t, SYSTEMS["bf16"], recomputed=9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq": 0}, "seq=0"),
        ({"tensor": 3}, "tensor=3 does not divide 32 heads"),
        ({"stages": 5}, "32 layers do not divide evenly into 5 stages"),
        ({"chunks": 2, "micro_batches": 6}, "multiple of 4 micro-batches"),
    ],
)
def test_training_says_what_does_not_fit_together(change, message):
    with pytest.raises(ValueError, match=message):
        training(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "fp8"}, "allowed are bf16, coat"),
        ({"gradients": "fp16"}, "allowed are fp32, int8"),
        ({"block": 0}, "at least 1"),
    ],
)
def test_system_says_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        System(**change)
