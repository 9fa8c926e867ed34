"""Values of the AGoQ chapter in the ledger that follow from models and from the paper's own numbers."""

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

import pytest

from dist_lib.agoq.bit_plan import LayerCost, in_flight, make_bit_plan
from dist_lib.agoq.layer_memory import TABLE_1_SHAPE, LayerShape, layer_units
from dist_lib.agoq.memory_model import SYSTEMS, Training, peak, stage_memory
from dist_lib.agoq.paper_tables import layer_table, memory_table, recompute_table, saving_table
from dist_lib.agoq.published import TABLE_2, TABLE_5, TABLE_6, TABLE_8
from dist_lib.agoq.speed_model import published_speed, speed_table
from dist_lib.agoq.wire import wire_bytes
from dist_lib.claims import load_claims, recomputers, recomputes
from dist_lib.models import get_config

GPU, NPU = "table 8, GPU", "table 8, NPU"
FOUR = {"layers": 32, "stages": 4, "micro_batches": 8, "chunks": 2}
EIGHT = in_flight(8, 16, 2)


def _text(values):
    return ", ".join(str(v) for v in values)


# ---- a layer --------------------------------------------------------------------------------------------------------


@recomputes("agoq-layer-coat")
def layer_coat():
    return float(layer_units("coat", TABLE_1_SHAPE))


@recomputes("agoq-table-1-cells")
def table_1_cells():
    return float(sum(r.error == 0 for r in layer_table()))


@recomputes("agoq-layer-scales")
def layer_scales():
    return float(layer_units("table1", TABLE_1_SHAPE, scale_bits=Fraction(32, 128)))


@recomputes("agoq-layer-built")
def layer_built():
    return float(layer_units("paper", TABLE_1_SHAPE))


@recomputes("agoq-layer-shared")
def layer_shared():
    return float(layer_units("shared", TABLE_1_SHAPE))


def _ratio(model):
    shape = LayerShape.of(get_config(model))
    return float(layer_units("bf16", shape) / layer_units("table1", shape))


@recomputes("agoq-layer-13b-ratio")
def ratio_13b():
    return _ratio("llama2-13b")


@recomputes("agoq-layer-8b-ratio")
def ratio_8b():
    return _ratio("llama3-8b")


# ---- a device -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _memory():
    return {(r.row.place, r.row.systems): r for r in memory_table()}


@lru_cache(maxsize=1)
def _saved():
    return {(r.place, r.technique): r for r in saving_table()}


@recomputes("agoq-memory")
def memory():
    return 100 * _saved()[GPU, "all"].modelled_share


@recomputes("agoq-memory-printed")
def memory_printed():
    return 100 * _saved()[GPU, "all"].published_share


@recomputes("agoq-memory-npu")
def memory_npu():
    return 100 * _saved()[NPU, "all"].published_share


@recomputes("agoq-memory-bf16")
def memory_bf16():
    return _memory()[GPU, "bf16"].modelled


@recomputes("agoq-memory-o")
def memory_o():
    return _memory()[GPU, "o"].modelled


@recomputes("agoq-memory-og")
def memory_og():
    return _memory()[GPU, "og"].modelled


@recomputes("agoq-memory-aog")
def memory_aog():
    return _memory()[GPU, "aog"].modelled


@recomputes("agoq-memory-built")
def memory_built():
    training = Training(config=get_config("llama2-13b"), seq=12 * 1024, tensor=8)
    return peak(stage_memory(training, SYSTEMS["paper"])).total / 1e9


@recomputes("agoq-saved-o")
def saved_o():
    return _saved()[GPU, "O"].modelled


@recomputes("agoq-saved-g")
def saved_g():
    return _saved()[GPU, "G"].modelled


@recomputes("agoq-saved-g-npu")
def saved_g_npu():
    return _saved()[NPU, "G"].modelled


@recomputes("agoq-saved-a")
def saved_a():
    return _saved()[GPU, "A"].modelled


@recomputes("agoq-borrowed")
def borrowed():
    return 100 * _saved()[GPU, "O"].modelled / _saved()[GPU, "all"].modelled


@recomputes("agoq-memory-32k")
def memory_32k():
    return 100 * _saved()["table 14, 32K", "all"].modelled_share


@recomputes("agoq-memory-64k")
def memory_64k():
    return 100 * _saved()["table 14, 64K", "all"].modelled_share


@recomputes("agoq-coat-memory")
def coat_memory():
    return 100 * (1 - 66_852 / 94_100)


# ---- stages ---------------------------------------------------------------------------------------------------------


@recomputes("agoq-in-flight")
def flying():
    return _text(in_flight(4, 8, 2))


@recomputes("agoq-in-flight-formula")
def flying_as_printed():
    return _text(4 + 2 * i - 1 for i in range(1, 5))


def _bits(rule, **more):
    plan = make_bit_plan(rule, **FOUR, **more)
    return [plan.bits_of_stage(s)[0] for s in range(4)]


@recomputes("agoq-stage-bits")
def stage_bits():
    return _text(_bits("paper"))


@recomputes("agoq-stage-bits-peak")
def stage_bits_peak():
    held = [n * b for n, b in zip(EIGHT, (b for b in _bits("paper") for _ in range(2)), strict=True)]
    return 100 * max(held) / held[0]


@recomputes("agoq-stage-bits-budget")
def stage_bits_budget():
    return _text(_bits("budget", cost=LayerCost(5, 11), widths=None))


def test_the_whole_of_a_stage_stays_below_the_first_even_where_its_codes_do_not():
    cost = LayerCost(5, 11)
    held = [n * cost.at(b) for n, b in zip(EIGHT, (b for b in _bits("paper") for _ in range(2)), strict=True)]
    assert max(held) == held[0]


# ---- speed ----------------------------------------------------------------------------------------------------------


@recomputes("agoq-speed")
def speed():
    return speed_table()[-1].modelled


@recomputes("agoq-speed-32k")
def speed_32k():
    return speed_table()[0].modelled


@recomputes("agoq-speed-errors")
def speed_errors():
    return 100 * max(abs(r.error) for r in speed_table()[1:])


@recomputes("agoq-speed-mean")
def speed_mean():
    return sum(r.modelled for r in speed_table()) / len(TABLE_2)


@recomputes("agoq-speed-no-recompute")
def no_recompute():
    return published_speed().speedup(0, 10)


@recomputes("agoq-recomputed")
def recomputed():
    return _text(r.recomputed for r in recompute_table())


@recomputes("agoq-overhead-arithmetic")
def overhead():
    sums = [sum(t.agoq_ms) for t in (TABLE_5, TABLE_6)], [sum(t.baseline_ms) for t in (TABLE_5, TABLE_6)]
    return sum(sums[0]) / sum(sums[1])


@recomputes("agoq-table-7-unit")
def table_7_unit():
    return 2148.82 / 2862.22


# ---- over ranks -----------------------------------------------------------------------------------------------------


def _wire_ratio(width, world=8, numel=2**20):
    ring = 2 * (world - 1) * numel * width / world
    return ring / wire_bytes("all_reduce", numel, world).sent


@recomputes("agoq-wire-ratio-fp32")
def wire_ratio_fp32():
    return _wire_ratio(4)


@recomputes("agoq-wire-ratio-bf16")
def wire_ratio_bf16():
    return _wire_ratio(2)


@recomputes("agoq-all-reduce-200g")
def all_reduce_200g():
    return _wire_ratio(4)


@recomputes("agoq-all-reduce-10g")
def all_reduce_10g():
    return _wire_ratio(4)


@recomputes("agoq-all-gather-misprint")
def all_gather_misprint():
    return 32 * 197.92


def test_the_paper_values_are_those_of_the_published_tables():
    claims = load_claims()
    rows = {(r.place, r.systems): r.gigabytes for r in TABLE_8}
    for systems in ("bf16", "o", "og", "aog"):
        assert claims[f"agoq-memory-{systems}"].paper_value == rows[GPU, systems]
    assert claims["agoq-speed"].paper_value == TABLE_2[-1].speedup
    assert claims["agoq-speed-32k"].paper_value == TABLE_2[0].speedup
    assert claims["agoq-speed-mean"].paper_value == pytest.approx(sum(r.speedup for r in TABLE_2) / 7, abs=0.005)
    wide = replace(get_config("llama2-13b"), d_ff=4 * 5120)
    assert float(layer_units("bf16", LayerShape.of(wide))) == claims["agoq-layer-bf16"].our_value


MINE = sorted(name for name, function in recomputers().items() if function.__module__ == __name__)


@pytest.mark.parametrize("claim_id", MINE)
def test_the_ledger_holds_what_is_computed(claim_id):
    claim, value = load_claims()[claim_id], recomputers()[claim_id]()
    assert claim.agrees(value), f"{claim_id}: the ledger says {claim.our_value}, computed {value}"
