"""Advice: which method for a machine, a model and its users, and from where its numbers come."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pandas as pd
import pytest

from harness.errors import UserError
from harness.model.shape import load_shape
from harness.paper.costmodel.step import (
    FULL_LAUNCHES,
    FUSED_LAUNCHES,
    LAUNCH_S,
    LAUNCHES_OF_A_PASS,
    LINK_LAUNCHES,
    NODE_S,
    modelled_step,
)
from harness.results.columns import read_frame
from harness.results.sheet import MAX_LETTERS, pipes
from harness.run import advise, cli, worked
from harness.run.advise import KNOWN
from harness.run.compose import load
from harness.settings.config import RunConfig
from harness.settings.paths import PACKAGES_DIR
from tests.runs import refusal_of

FEW = ("Full cache", "KIVI-4", "InfiniGen2", "Quest", "Streaming", "Quest + int8")
SMALL = ("model=llama3.1-8b", "model.shape.num_hidden_layers=4", "prompt_len=16256", "gen_len=8")


def question(*words: str) -> RunConfig:
    """Of a model with few layers, which are sized quickly."""
    return load(["experiment=advise", *SMALL, *words])


@pytest.fixture
def few(monkeypatch):
    """The board's rows of a few methods at 10 %."""
    every = advise.board_rows
    monkeypatch.setattr(advise, "board_rows", lambda context: few_of(every(context)))


def few_of(rows: pd.DataFrame) -> pd.DataFrame:
    is_looked_at = rows.label.isin(FEW) & (rows.asked_budget == 0.1)
    return rows[rows.family.isin(advise.OWN_BUDGET) | is_looked_at]


def with_cells(option: advise.Option, **cells: object) -> advise.Option:
    """The option, were its row of the board another."""
    return replace(option, board=pd.Series({**option.board, **cells}))


def test_a_step_takes_what_its_bytes_its_nodes_and_its_host_take():
    """Written out for the full cache of one user on the device: 17 nodes of 1 us in each of 32 layers, 86 outside."""
    shape = load_shape("llama3.1-8b")
    asked = load(["experiment=advise", "platform=h100-pcie5", "prompt_len=8064"])
    config = advise.modelled(asked, ["method=full", "placement=device"])
    for bits in (16, 4):
        step = modelled_step(config, weight_bits=bits)
        head = shape.vocab_size * shape.hidden_size
        weights = shape.num_layers * (shape.attention_weights + shape.ffn_weights) + head
        cached = (8064 + 8192) // 2 + 1
        cache_bytes = shape.num_layers * shape.token_bytes * cached
        bytes_s = (weights * bits / 8 + cache_bytes) / (0.81 * 2.0e12)
        assert replace(step, node_s=0).seconds(1) == pytest.approx(bytes_s, rel=2e-3)
        nodes_s = (32 * 17 + 86) * 1e-6
        assert step.seconds(1) - replace(step, node_s=0).seconds(1) == pytest.approx(nodes_s)
        whole = shape.num_layers * (shape.attention_weights + shape.ffn_weights) + 2 * head
        assert step.capacity.plan.model.weight_bytes == pytest.approx(whole * bits / 8, rel=1e-3)
    assert step.host_seconds(17) == pytest.approx((86 + 32 * 17) * 55e-6)
    products = 2 * shape.num_layers * (shape.attention_weights + shape.ffn_weights) * 8064
    scores = 2 * shape.num_layers * shape.query_size * 8064**2
    assert step.prefill_seconds(0.5) == pytest.approx((products + scores) / (0.5 * 7.56e14))


def test_a_step_that_selects_has_the_nodes_of_fused_kernels_and_of_the_link(few):
    """On the link's stream they add to the rows' way; this code's host launches both streams'. What an engine
    launches is what this code does where it has kernels of its own."""
    assert KNOWN["launches"]["full"] == [FULL_LAUNCHES] * 2
    assert KNOWN["launches"]["infinigen2"][1] == FUSED_LAUNCHES
    options, _ = advise.options_of(question("platform=h100-pcie5", "batch_size=2"))
    of = {(option.label, option.place): option.step for option in options}
    nodes = {}
    for key in (("InfiniGen2", "device"), ("Streaming", "device"), ("KIVI-4", "device"), ("InfiniGen2", "host")):
        step = of[key]
        block, bare = step.blocks(1)[0], replace(step, node_s=0).blocks(1)[0]
        nodes[key] = [(block.attention - bare.attention) / NODE_S, (block.store - bare.store) / NODE_S]
    assert nodes["InfiniGen2", "device"] == nodes["Streaming", "device"] == pytest.approx([FUSED_LAUNCHES, 0])
    assert nodes["KIVI-4", "device"] == pytest.approx([FULL_LAUNCHES, 0])
    assert nodes["InfiniGen2", "host"] == pytest.approx([FUSED_LAUNCHES, LINK_LAUNCHES])
    here, there = of["InfiniGen2", "device"], of["InfiniGen2", "host"]
    assert there.host_seconds(40) - here.host_seconds(40) == pytest.approx(4 * LINK_LAUNCHES * LAUNCH_S)


def test_the_answer_joins_memory_speed_and_the_board(few):
    config = question("platform=rtx4090-pcie4", "batch_size=100")
    options, left = advise.options_of(config)
    assert list(left) == ["Quest + int8"]  # of which nobody measured answers
    of = {(option.label, option.place): option for option in options}
    assert ("Full cache", "host, GPU cache") not in of and ("Streaming", "host") not in of

    board = read_frame(advise.BOARD)
    board = board[(board.over == advise.OVER) & (board.asked_budget == 0.1)]
    for (label, _), option in of.items():
        assert option.users == option.step.capacity.largest
        assert option.step.capacity.needs(option.users).device <= 2.577e10
        rows = board[(board.label == label) & (board.seq_len == 4096)].fillna({"answers_difference": 0})
        if len(rows):
            assert option.board.ratio == pytest.approx(rows.ratio.item(), nan_ok=True) or option.key == "full"
            assert option.lost == -rows.answers_difference.item()
    full = of["Full cache", "device"]
    assert full.users < 100 and full.served == full.users and full.why_not == f"holds {full.users} users"
    assert of["Quest", "host"].why_not.startswith("loses ")
    rows = of["InfiniGen2", "host, GPU cache"]
    assert rows.total_at_hit_rate(0.6) < rows.total_at_hit_rate(0.95)
    # 4 layers of 33 launches and of 3 on the link, and 86 outside them
    own_s = max(rows.tpot_s, (4 * (33 + 3) + LAUNCHES_OF_A_PASS) * LAUNCH_S)
    assert rows.own_total == pytest.approx(rows.served / own_s)
    assert of["FP8", "device"].own_total is None, "nobody counted its launches"

    first, *changes = advise.recommendation(options)
    best = min((option for option in options if not option.why_not), key=lambda option: option.tpot_s)
    assert first.startswith(f"Recommendation: {best.label}") and changes[1] == "What would change it:"

    # One that was asked fewer questions is neither recommended nor the nearest.
    most = best.board.most_questions
    less = {one: with_cells(one, num_questions=most - 1) for one in options if one.label == best.label}
    options = [less.get(one, one) for one in options]
    assert less[best].why_not == f"was asked {most - 1:.0f} of {most:.0f} questions"
    assert not advise.recommendation(options)[0].startswith(f"Recommendation: {best.label}")
    assert best.label not in advise.recommendation([option for option in options if option.why_not])[-1]


def test_rows_are_coded_as_the_board_measured_them():
    config = question("platform=h100-pcie5", "batch_size=2")
    label = "InfiniGen2, sampled rest + int8"
    rows = advise.board_rows(16264).set_index("label", drop=False)
    for option in advise._options(config, rows.loc[label].iloc[0]):
        codec = option.step.capacity.plan.codec
        assert codec is not None and codec.group_size == 16
        assert advise._named(option).endswith(f"({option.place}; group_size=16)")


def test_more_users_than_a_search_for_a_batch_tries_may_fit(few):
    words = ["experiment=advise", "model=opt-125m", "prompt_len=64", "gen_len=16", "platform=h100-pcie5"]
    config = load([*words, "batch_size=2000"])
    on_device = next(advise._options(config, advise.board_rows(80).iloc[0]))
    assert on_device.users > 2000 and on_device.served == 2000


def test_what_fits_without_offloading_stands_first(few):
    """A token takes 4 KiB in each of 4 layers. Weights in 4 bits are a quarter."""
    options, _ = advise.options_of(question("platform=h100-pcie5", "batch_size=2"))
    fits, _ = advise.first_lines(options)
    assert fits.startswith(f"Your cache fits: {2 * 16264 * 4 * 4096 / 2**30:.1f} GiB beside ")
    assert fits.endswith("in 80.0; the device holds 2 x 131,072 tokens. Expect nothing from offloading.")
    small, fast_link = "platform.device_bytes=8e9", "platform.link_bytes_per_s=1e14"
    many, _ = advise.options_of(question("platform=rtx4090-pcie4", "batch_size=100", small, fast_link))
    fits, pays = advise.first_lines(many)
    full = next(option for option in many if option.key == "full" and option.place == "device")
    context = advise.fitting_context(full)
    assert fits.endswith(f". {full.users} of 100 users do; the device holds 100 x {context:,} tokens.")
    assert 0 < context < 16264
    for tokens, fits_there in ((context, True), (context + 1, False)):
        capacity = replace(full.step.capacity, prompt_len=tokens - 8)
        assert (capacity.largest >= 100) == fits_there
    light = full.with_weights(4)
    saved = full.step.capacity.plan.model.weight_bytes * 3 // 4
    per_user = full.step.capacity.needs(2).slots - full.step.capacity.needs(1).slots
    assert light.users - full.users == pytest.approx(saved / per_user, abs=1)
    sheet, *_ = advise.sheets(many)
    shown = sheet.table.set_index("label")
    assert shown.at["Full cache", "users that fit"] == str(full.users)
    assert {"FP8", "INT8", "INT4", "KIVI-4", "llama.cpp q8_0", "NVFP4"} <= set(shown.index)
    assert shown.at["FP8", "answers lost (points)"] == "7.5"
    # Before that number of users the device alone gives as many tokens/s in all or more.
    number, by = advise.pays_from(many)
    assert f"Offloading pays from {number} users on, by {by.label}" in pays
    allowed = [option for option in many if option.loses_little]
    best = {
        users: [
            max(option.total_at(users) for option in allowed if (option.place == "device") == on_device)
            for on_device in (True, False)
        ]
        for users in (number - 1, number)
    }
    assert best[number - 1][0] >= best[number - 1][1] and best[number][0] < best[number][1]
    data = advise.as_data(many, {})
    assert (data["offloading_pays_from_users"], data["offloading_pays_by"]["label"]) == (number, by.label)


@pytest.mark.parametrize("place", ["device", "host, GPU cache"])
def test_the_command_of_an_option_runs_what_was_modelled(few, place):
    options, _ = advise.options_of(question("platform=h100-pcie5", "batch_size=2", "gen_len=16"))
    option = next(option for option in options if option.label == "InfiniGen2" and option.place == place)
    config = load(advise.command(option).split()[2:])
    plan = option.step.capacity.plan
    assert (config.method_name, config.budget, config.kind) == ("infinigen2", 0.1, "latency")
    assert (config.placement, config.gpu_cache) == (plan.placement, plan.gpu_cache)
    assert (config.latency.batch_size, config.latency.prompt_len) == (2, 16256)
    assert config.method.dense_layers == plan.method.dense_layers


def test_the_first_answer_stands_in_readme():
    """Each of README's lines has the cells of one line of the page."""
    readme = (PACKAGES_DIR / "README.md").read_text(encoding="utf-8")
    page = (PACKAGES_DIR / "results" / "advise.md").read_text(encoding="utf-8")
    assert advise.timed() in readme and advise.timed() in page
    ours, tables = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
        for text in (readme.split("<!--advise-->")[1], page[: page.index("## 2.")])
    )
    assert len(ours) > 4
    assert all(any({*cells} <= {*line} for line in tables) for cells in ours[2:])


def test_what_is_asked_decides(few, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FEW", FEW[:3])
    plenty, _ = advise.options_of(question("platform=h100-pcie5", "batch_size=20"))
    first, *changes = advise.recommendation(plenty)
    assert first.startswith("Recommendation: InfiniGen2 at 10.0 % (device), of which ")
    assert any(line.startswith("- A limit of 0.0 points: ") for line in changes)
    nothing, _ = advise.options_of(question("platform=rtx4090-pcie4", "batch_size=100", "advise.tokens_per_s=5000"))
    first, *_, nearest = advise.recommendation(nothing)
    assert first == "Recommendation: none. No method that was measured meets all that is asked."
    assert nearest.startswith("The nearest is ")
    slow, _ = advise.options_of(question("platform=rtx4090-pcie4", "batch_size=2", "advise.ttft_s=0.1"))
    assert all(option.why_not.startswith("a prompt takes") for option in slow if option.users >= 2)
    smaller, _ = advise.options_of(question("platform=rtx4090-pcie4", "batch_size=100", "advise.weight_bits=4"))
    largest = {(option.label, option.place): option.users for option in smaller}
    assert all(largest[option.label, option.place] > option.users for option in nothing)


def test_the_command_prints_it(few, capfd, tmp_path):
    words = [f"results_dir={tmp_path}", "experiment=advise", "batch_size=100", *SMALL]
    assert cli.main(words) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("Your cache does not fit: ") and "\nRecommendation: " in printed
    assert cli.main([*words, "advise.format=json"]) == 0
    data = json.loads(capfd.readouterr().out)  # nothing else
    assert not [*tmp_path.iterdir()]
    assert data["source"] == "modelled" and data["asked"]["batch_size"] == 100
    assert f"Recommendation: {data['recommendation']['label']}" in printed and len(data["options"]) > 10
    assert not data["fits_without_offloading"] and data["users_that_fit_without_offloading"] < 100
    assert f"100 x {data['context_that_fits_without_offloading']:,} tokens" in printed
    assert (data["offloading_pays_from_users"] is None) == ("Offloading pays at no number" in printed)
    assert all(off["times"] > advise.OFF and off["what"] in printed for off in data["model_is_off"])
    assert any("KIVI-4" in off["what"] for off in data["model_is_off"])
    for words in ("Machine: 1 rtx4090-pcie4, by NVIDIA", "Not measured: this model", "Left out, as nobody measured"):
        assert words in printed
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    assert any("rows lie" in line and "points lost" in line for line in tables)
    assert max(map(len, tables)) <= MAX_LETTERS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["platform=card"], "platform.flops_per_s=???: must be a number"),
        (["platform=cpu"], "platform=cpu: kind=advise needs a modelled machine"),
        (["model=opt-30b", "prompt_len=1024"], "platform=rtx4090-pcie4: its 24 GiB must be above"),
        (["budget=0.1"], "budget=0.1: plays no part in kind=advise"),
        (["advise.format=yaml"], "advise.format=yaml: "),
    ],
)
def test_what_cannot_be_known_is_refused_in_one_line(words, message, capfd):
    assert message in refusal_of(cli.main, ["experiment=advise", *words], capfd)


def test_the_worked_questions_stand_on_their_page_with_their_errors():
    """The tables beside seen speeds are made anew; the answers take minutes."""
    page = (PACKAGES_DIR / "results" / "advise.md").read_text(encoding="utf-8")
    num_seen = 0
    for asked in KNOWN["worked"]:
        assert " ".join(asked["settings"]) in page
        if "refused" in asked:
            with pytest.raises(UserError, match="the cost model knows"):
                advise.options_of(load(["experiment=advise", *asked["settings"]]))
        if "published" not in asked:
            continue
        sheet = worked.beside_seen(asked)
        num_seen += len(sheet.table)
        assert pipes(sheet) in page
        for known, (_, ours, seen, error, _) in zip(asked["published"], sheet.table.to_numpy(), strict=True):
            assert float(error) == pytest.approx(100 * (float(ours) / float(seen) - 1), abs=1)
            assert abs(float(error)) <= 20 or "because" in known
    assert num_seen >= 10


def test_every_option_of_the_board_has_its_launches():
    rows = advise.board_rows(10**6)
    for _, row in rows[(rows.family != "codes") & rows.answers_lost.notna()].iterrows():
        assert row["key"] in KNOWN["launches"]
    assert all(re.fullmatch(r"[a-z0-9-]+(\+int[48])?", key) for key in KNOWN["launches"])


def test_a_users_settings_reach_every_option(few):
    options, _ = advise.options_of(question("platform=h100-pcie5", "platform.host_bytes=1e9", "advise.hit_frac=0.5"))
    for option in options:
        assert option.step.hit_frac == (0.5 if option.place == "host, GPU cache" else 0)
        if option.place == "host":
            assert option.users <= replace(option.step.capacity, host_bytes=None).largest
            assert option.step.capacity.needs(max(1, option.users)).host <= 1e9 or option.users == 0
