"""How many sequences fit: hand-computed sizes and steps, the emulated limit, refusals, the figure."""

import re
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from harness.decode import memory
from harness.decode.memory import GIB
from harness.decode.needs import Capacity, Plan, largest_batch, sizes_of
from harness.errors import UserError
from harness.model.attach import attach
from harness.model.load import LoadedModel, RandomIds
from harness.model.prompts import run_prompt
from harness.model.shape import ModelShape
from harness.paper.costmodel import step as modelled
from harness.paper.costmodel.predict import Efficiency, Platform
from harness.run.advise import modelled as modelled_run
from harness.run.cli import main
from harness.run.compose import load
from harness.speed import latency, memories
from methods.codecs.integers import IntegerCodec
from methods.codecs.split import SplitCodec
from methods.full import Full
from methods.h2o import H2O
from plots import speed as figures
from plots.drawing import figure_of
from tests.cases import CASES
from tests.conftest import refused
from tests.decode.test_needs import prompts_of
from tests.living import PROMPT, attached_with_link, calibration_of, open_live, tiny
from tests.runs import reading, refusal_of, rows_at, tiny_loaded
from tests.tiny_models import tiny_model

EXACT = Efficiency(1.0, 1.0, 1.0)
SHAPE = ModelShape("tiny", 4, 64, 4, 2, 16, 128, 3, 256, 1)
"""The sizes of a tiny llama with 2 KV heads; 128 bytes a cached token, layer and sequence in half precision."""
ROW = 128
WEIGHTS = 10_000
RATES = {"flops_per_s": 1e15, "memory_bytes_per_s": 1e9, "link_bytes_per_s": 1e6, "host_channel_bytes_per_s": 1e9}
MACHINE = Platform("machine", "modelled", "nowhere", device_bytes=1e6, **RATES)


def capacity_of(method=None, codec=None, placement="device", *, device_bytes=200_000, host_bytes=None, **options):
    """A method on a small machine, sequences of 24 + 8 tokens. Activations are left out."""
    method = method or Full(dense_layers=2)
    geometry = modelled.geometry_of(SHAPE, "llama")
    model = modelled.sizes_of_shape(SHAPE, geometry, method, WEIGHTS)
    model = replace(model, sizes=model.sizes._replace(hidden=0, head_dim=0, attention=0, ffn=0))
    plan = Plan(model, method, codec, placement, **options)
    return Capacity("platform=machine", plan, 24, 8, device_bytes, host_bytes, max_batch=50)


OWN_S = 4 * ROW / 1e6 + 4 * (2 * 64 * (2 * 64 + 2 * 32) + 8 * ROW) / 1e9
"""Of a step whose layers wait for 8 rows each: the own rows cross, and the attention computes, while nothing is
fetched."""


def test_the_largest_batch_by_hand():
    """190,000 bytes are left. A sequence of the full cache has 4 layers x 32 tokens x 128 bytes = 16,384; on the host
    it has 2 buffers of 33 rows, 8,448, and while the prompt is read 24 rows of two layers are under way, 6,144."""
    on_device = capacity_of()
    assert (on_device.largest, on_device.wall_of(12)) == (190_000 // 16_384, "device memory")
    assert on_device.full.largest == on_device.equal_batch == 11
    on_host = capacity_of(placement="host")
    assert on_host.largest == 190_000 // (8_448 + 6_144) == 13 and on_host.equal_batch == 11
    assert on_host.batches(curve=False) == [11, 13], "no power of two below them"
    # Half the host memory: 16,384 bytes a sequence there.
    limited = capacity_of(placement="host", host_bytes=10 * 16_384 + 1)
    assert (limited.largest, limited.wall_of(11)) == (10, "host memory")
    # Two dense layers whole, and 8 of 32 tokens in the two others: slots, tokens and score (10 of 8 bytes, 2 heads),
    # and 2 limits of 8 bytes.
    h2o = H2O(heavy_frac=0.125, recent_frac=0.125, dense_layers=2)
    slots, state = 2 * 32 * ROW + 2 * 8 * ROW, 2 * (2 * 10 * 8 + 2 * 8) + 16
    assert capacity_of(h2o).needs(1).session == slots + state
    assert capacity_of(h2o).largest == 190_000 // (slots + state)
    assert capacity_of(device_bytes=16_384 + 9_999).largest == 0
    assert [largest_batch(most.__ge__, 20) for most in range(22)] == [*range(21), 20]
    assert capacity_of(device_bytes=10**9).largest == 50 and capacity_of(device_bytes=10**9).wall_of(51) == "max_batch"


def test_a_modelled_step_by_hand():
    """Arithmetic costs nothing here, so a kernel takes its bytes at 1 GB/s, and a transfer its own at 1 MB/s."""
    block = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128)  # weights of attention and FFN in fp16
    head = 2 * 256 * 64
    rows = 3 * 28 * ROW  # of a layer, at 28 tokens, the middle of the decoding
    on_device = modelled.Step(MACHINE, SHAPE, capacity_of(), efficiency=EXACT, node_s=0)
    compute = (4 * (block + rows) + head) / 1e9
    assert on_device.seconds(3) == pytest.approx(compute) and on_device.budget == 1
    # Over the link all rows of all layers cross, and hide everything else; so do the own rows.
    on_host = modelled.Step(MACHINE, SHAPE, capacity_of(placement="host"), efficiency=EXACT, node_s=0)
    assert on_host.seconds(3) == pytest.approx(4 * (rows + 3 * ROW) / 1e6, rel=0.01)
    # INT4 in two of four layers: 16 codes and an fp16 scale and minimum, for key and value.
    coded = capacity_of(Full(dense_layers=2), IntegerCodec("int4"), "host")
    int4 = modelled.Step(MACHINE, SHAPE, coded, efficiency=EXACT, node_s=0)
    share = 2 * (8 + 4) / (2 * 32)
    assert int4.budget == pytest.approx((2 + 2 * share) / 4)
    expected = (2 + 2 * share) * rows + 2 * 3 * ROW * (1 + share)
    assert int4.seconds(3) == pytest.approx(expected / 1e6, rel=0.01)
    # The last 8 of 28 tokens stay exact on the device.
    kivi = capacity_of(Full(dense_layers=2), SplitCodec(IntegerCodec("int4"), IntegerCodec("int4"), 8), "host")
    residual = modelled.Step(MACHINE, SHAPE, kivi, efficiency=EXACT, node_s=0)
    assert residual.budget == pytest.approx((2 + 2 * share * 20 / 28) / 4)
    expected = (2 + 2 * share * 20 / 28) * rows + 2 * 3 * ROW * (1 + share)
    assert residual.seconds(3) == pytest.approx(expected / 1e6, rel=0.01)
    # On the device fused kernels read codes and scales as they lie there, and the exact rows beside them.
    here = modelled.Step(MACHINE, SHAPE, capacity_of(kivi.plan.method, kivi.plan.codec), efficiency=EXACT, node_s=0)
    stored = (2 + 2 * (share * 20 + 8) / 28) * rows
    assert here.seconds(3) == pytest.approx((4 * block + head + stored) / 1e9)


@pytest.mark.parametrize("dense_layers", [0, 2])
def test_rows_of_dense_layers_and_of_own_queries_share_the_link(dense_layers):
    method = replace(CASES["infinigen-own"].method, dense_layers=dense_layers)
    step = modelled.Step(MACHINE, SHAPE, capacity_of(method, placement="host"), efficiency=EXACT, node_s=0)
    dense, selected = 28 * dense_layers, 8 * (4 - dense_layers)
    link_s = (dense + selected) * ROW / 1e6
    assert link_s < step.seconds(1) <= link_s + OWN_S + 1e-8


def test_rows_that_stay_on_the_device_do_not_cross():
    method = CASES["infinigen-own"].method
    steps = {}
    for hit_frac, rows in ((0.0, 0), (0.75, 2)):
        capacity = capacity_of(method, placement="host", gpu_cache=rows)
        steps[hit_frac] = modelled.Step(MACHINE, SHAPE, capacity, hit_frac, EXACT, node_s=0)
    read = 4 * 8 * ROW / 1e6  # 0.3 of 28 tokens
    assert steps[0.0].seconds(1) == pytest.approx(read + OWN_S)
    assert steps[0.75].seconds(1) == pytest.approx(0.25 * read + OWN_S)


@pytest.mark.parametrize("method", [Full(dense_layers=2), CASES["h2o"].method, CASES["quest"].method])
def test_a_shape_has_the_sizes_of_the_loaded_model(method):
    model = tiny_model("llama", num_key_value_heads=2)
    with attach(model) as attached:
        loaded = sizes_of(attached, method)
    geometry = modelled.geometry_of(SHAPE, "llama")
    shaped = modelled.sizes_of_shape(SHAPE, geometry, method, loaded.weight_bytes)
    for one, other in zip(shaped.layers, loaded.layers, strict=True):
        kinds = [(layer.policy.kind, layer.policy.number, layer.policy.when) for layer in (one, other)]
        assert one._replace(policy=None) == other._replace(policy=None) and kinds[0] == kinds[1]
    assert shaped.sizes._replace(ffn_rows=None) == loaded.sizes._replace(ffn_rows=None)


# The emulated device


@pytest.mark.parametrize(("name", "placement"), [("full", "device"), ("infinigen", "host"), ("h2o", "device")])
def test_an_emulated_device_refuses_one_byte_too_few(name, placement):
    case = CASES[name]
    ids, real = prompts_of((PROMPT,) * 2)
    with attached_with_link() as (attached, link):
        plan = Plan(sizes_of(attached, case.method), case.method, case.codec, placement)
        prompt = run_prompt(attached, ids, real)

        def start() -> None:
            with closing(open_live(attached, case, 3, placement=placement, link=link)) as session:
                session.start(prompt)
                lengths.append(session.max_new_tokens)

        lengths: list[int] = []
        start()
        plan = replace(plan, calibration=calibration_of(attached))
        capacity = Capacity("here", plan, PROMPT, lengths[0], 10**9, None, 8)
        needs = capacity.needs(2)
        with memory.emulated_device(needs.device / GIB, needs.weights):
            start()
        with (
            memory.emulated_device((needs.device - 1) / GIB, needs.weights),
            refused(r"^platform.device_gib=\S+: the weights take 0.001 GiB and live"),
        ):
            start()
        start()  # no limit is left behind
        with pytest.raises(UserError, match="must be above"), memory.emulated_device(1e-9, needs.weights):
            pass


SHORT = ["prompt_len=40", "gen_len=12", "timed_steps=2", "calibration.num_tokens=40", "platform.link_gbps=1"]


def test_an_emulated_run_finds_opens_and_times_the_largest_batch(monkeypatch, tmp_path, capsys):
    texts = reading(monkeypatch, tmp_path, tiny_loaded())
    device = ["platform.device_gib=0.003"]
    for words in (["system=ideal"], ["system=offload"], ["system=infinigen2+rows"]):
        assert main(["experiment=capacity", "sweep=null", *texts[1:], *SHORT, "gen_len=60", *device, *words]) == 0
    capsys.readouterr()
    by_label: dict[str, list] = {}
    for row in rows_at("outputs/tables/capacity.csv"):
        by_label.setdefault(row["label"], []).append(row)
    assert list(by_label) == ["ideal", "infinigen2+rows", "offload"]
    equal = by_label["ideal"][-1]["largest_batch"]
    assert by_label["offload"][-1]["largest_batch"] > equal > 1
    for of_label in by_label.values():
        last = of_label[-1]
        assert (last["equal_batch"], last["wall"], last["source"]) == (equal, "device memory", "emulated")
        assert last["kv_tokens"] == last["largest_batch"] * 100 and last["context"] == 100
        at_equal = {row["batch_size"]: row["decode_tokens_per_s"] for row in of_label}.get(equal)
        assert last["equal_tokens_per_s"] == at_equal
        assert last["device_kv_bytes"] < last["memory_bytes"] == int(0.003 * GIB)
    (axes,) = figure_of(Path("outputs"), "capacity").axes
    assert axes.get_xlabel() == "batch size (sequences)"


def test_a_batch_that_the_device_does_not_hold_is_refused_in_a_timed_run(monkeypatch, tmp_path, capsys):
    texts = reading(monkeypatch, tmp_path, tiny_loaded())
    words = ["experiment=latency", *texts[1:], *SHORT, "system=ideal", "platform.device_gib=0.003", "batch_size=400"]
    assert refusal_of(main, words, capsys).startswith("platform.device_gib=0.003: the weights take")


# A GPU


@pytest.mark.parametrize(
    ("room", "attempts", "ran_out_at"),
    [
        (11, [1, 2, 4, 8, 11], None),
        (10, [1, 2, 4, 8, 11, 9, 10], 11),
        (8, [1, 2, 4, 8, 11, 9], 9),
        (6, [1, 2, 4, 8, 6, 7], 7),
        (0, [1], 1),
    ],
)
def test_where_memory_does_not_suffice_the_largest_batch_that_runs_is_found(room, attempts, ran_out_at):
    """11 sequences fit by arithmetic."""
    tried: list[int] = []

    def attempt(batch):
        tried.append(batch)
        return None if batch <= room else "host memory" if batch == 11 else "device memory"

    found = latency.largest_that_runs(capacity_of(), True, attempt)
    assert (tried, found.ran_out_at, found.largest) == (attempts, ran_out_at, room)
    assert found.wall_of(room + 1) == ("host memory" if ran_out_at == 11 else "device memory")
    assert found.equal_batch == 11, "of the full cache by arithmetic"


def test_prompts_that_pass_together_need_so_much_more():
    """Else 2,048 tokens at a time."""
    with attached_with_link() as (attached, _):
        plan = Plan(sizes_of(attached, Full()), Full(), None, "device")
    together, in_turn = (Capacity("here", plan, 2048, 8, 10**9, None, 8, in_one_pass=each) for each in (True, False))
    assert together.needs(2).workspace == 2 * in_turn.needs(2).workspace > 0


@pytest.mark.parametrize(("gib", "memory_gib"), [(None, 0.25), (0.3, 0.3)])
def test_a_gpu_is_measured_as_far_as_its_memory_goes(monkeypatch, tmp_path, gib, memory_gib):
    """On the CPU instead of a GPU of .4 GiB. A batch above 5 runs out of the host's memory, above 6 of the GPU's."""
    timed: list[tuple[int, torch.Size]] = []

    def time_run(attached, prompt, run, **options):
        timed.append((run.shape.batch_size, prompt.shape))
        if run.shape.batch_size > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if run.shape.batch_size > 5:
            raise memory.NoRoomError("live decoding needs too much of cpu memory", is_host=True)
        return real(attached, prompt, run, **options)

    real = latency.time_run
    monkeypatch.setattr(latency, "time_run", time_run)
    monkeypatch.setattr(latency, "available_bytes", lambda home: int(0.4 * GIB))
    monkeypatch.setattr(memories, "smaller_card", lambda device, asked: nullcontext(cards.append(asked)))
    monkeypatch.setattr("harness.speed.link_rate.measure_copy_rate", lambda device: 1e10)
    cards: list[float | None] = []
    loaded = LoadedModel(tiny("gqa"), None, "tiny", 512, random_ids=RandomIds(256))
    words = ["experiment=capacity", "sweep=null", "platform=cuda", "system=offload", "model.weights=random"]
    words += ["prompt_len=40", "gen_len=4", "timed_steps=1", "calibration.num_tokens=40"]
    words += ["capacity.max_batch=20", f"platform.device_gib={'null' if gib is None else gib}"]
    outcome = latency.run_latency(load([*words, f"results_dir={tmp_path}"]), loaded)
    assert timed == [(batch, (batch, 40)) for batch in (1, 2, 4, 8, 6, 5)] and cards == [gib]
    rows = outcome.metrics["points"]
    assert [row["batch_size"] for row in rows] == [1, 2, 4, 5]
    assert all(row["decode_tokens_per_s"] > 0 and row["source"] == "measured" for row in rows)
    (last,) = {(row["largest_batch"], row["wall"], row["memory_bytes"], row["platform"]) for row in rows}
    assert last == (5, "host memory", int(memory_gib * GIB), "cuda")
    assert outcome.samples["ran_out_at"] == [8, 6] and outcome.samples["batch_5"]["peak_device_bytes"] > 0
    monkeypatch.setattr(latency, "available_memory", lambda: 2 * rows[0]["host_kv_bytes"])
    rows = latency.run_latency(load([*words, f"results_dir={tmp_path}"]), loaded).metrics["points"]
    assert (rows[-1]["largest_batch"], rows[-1]["wall"]) == (2, "host memory")


# Refusals

REFUSED = [
    (["method=full"], "platform.device_gib=null: batch_size=largest needs the memory of the emulated device"),
    (["platform=h100-pcie5", "method=full"], "platform=h100-pcie5: is modelled, nothing runs there but"),
    (["platform.device_gib=1", "experiment=perplexity"], "platform.device_gib=1: experiment=perplexity decodes"),
    (["experiment=perplexity", "batch_size=largest"], "batch_size=largest: must be a whole number"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_settings_without_meaning_are_refused(words, said):
    with refused(f"^{re.escape(said)}"):
        load(["experiment=capacity", *words] if "perplexity" not in words[-1] else words)


@pytest.mark.parametrize(
    ("question", "run", "said"),
    [
        ([], "method=infinigen", "method=infinigen: how many tokens it reads depends on the text"),
        (["model=gemma3-270m"], "method=full", "model=gemma3-270m: the cost model knows opt"),
        (["platform.cards=3"], "method=full", "platform.cards=3: must divide the 8 KV heads of llama3.1-8b"),
    ],
)
def test_what_cannot_be_modelled_is_refused(question, run, said):
    asked = load(["experiment=advise", "platform=h100-pcie5", *question])
    with refused(f"^{re.escape(said)}"):
        modelled.modelled_step(modelled_run(asked, [run]))


def test_the_figure_marks_walls_and_where_a_method_wins(monkeypatch):
    base = {"model": "m", "platform": "cpu", "source": "emulated", "context": 1024, "memory_bytes": GIB}
    rows = []
    for label, rates, wall in (("ideal", [10, 15], "device memory"), ("offload", [5, 9, 16, 20], "max_batch")):
        for power, rate in enumerate(rates):
            numbers = {"label": label, "batch_size": 2**power, "decode_tokens_per_s": rate, "wall": wall}
            rows.append(base | numbers)
    rows.append(base | {"label": "h2o (device)", "batch_size": 0, "decode_tokens_per_s": None, "wall": "device memory"})
    figure = figures.capacity(pd.DataFrame(rows).assign(own=False))
    (axes,) = figure.axes
    drawn = [(line.get_marker(), list(line.get_xdata(orig=True))) for line in axes.lines]
    assert ("|", [2]) in drawn, "the full cache ends at 2"
    assert not any(marker == "|" and x == [8] for marker, x in drawn), "the search ended, not the memory"
    rings = [x for marker, x in drawn if marker == "o" and len(x) == 1]
    assert rings == [[4]], "the first batch of offload above 15 tokens/s"
    assert ("x", [1]) in drawn, "not one sequence fits"


def test_two_cards_have_twice_the_rates_and_add_up_their_outputs():
    """Each of two sends and takes the batch's outputs once, 3 x 64 elements, twice in each of four layers."""
    one = modelled.Step(MACHINE, SHAPE, capacity_of(), efficiency=EXACT, node_s=0)
    two = replace(one, platform=replace(MACHINE, cards=2).together)
    joins_s = 4 * 2 * (3 * 64 * 2) / 1e6
    assert two.seconds(3) == pytest.approx(one.seconds(3) / 2 + joins_s)
    assert two.prefill_seconds(1.0) == pytest.approx(one.prefill_seconds(1.0) / 2 + 24 / 3 * joins_s)
    asked = load(["experiment=advise", "platform=h100-pcie5", "platform.cards=2"])
    assert modelled.modelled_step(modelled_run(asked, ["method=full"])).capacity.device_bytes == 2 * 8.59e10
