"""Methods without a model: refusals, budget arithmetic, selection primitives, columns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from methods.base import EMPTY, Geometry, Lengths, PromptRows, Row, Rows
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import COLUMN_RULES, InfiniGen, Oracle, choose_columns
from methods.prompt_evicting import SnapKV
from methods.quest import Quest
from methods.selection import GROUPS, largest
from methods.streaming import Streaming
from methods.tova import TOVA

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 4
GEOMETRY = Geometry(
    num_layers=1, num_heads=KV_HEADS * GROUP, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=0.5, family="llama"
)
fractions = st.floats(0.0, 1.0)
positive_fractions = st.floats(0.01, 1.0)
seeds = st.integers(0, 2**31)


# Refusals


@pytest.mark.parametrize(
    "method, settings, message",
    [
        (Full, {"num_exempt_layers": -1}, r"method\.num_exempt_layers=-1: .*>= 0"),
        (H2O, {"heavy_frac": -0.1}, r"method\.heavy_frac=-0\.1: .*\[0, 1\]"),
        (H2O, {"heavy_frac": math.nan}, r"method\.heavy_frac=nan: .*\[0, 1\]"),
        (H2O, {"recent_frac": 1.5}, r"method\.recent_frac=1\.5: .*\[0, 1\]"),
        (H2O, {"heavy_frac": 0.7, "recent_frac": 0.6}, r"heavy_frac \+ method\.recent_frac=1\.2.*\(0, 1\]"),
        (H2O, {"heavy_frac": 0.0, "recent_frac": 0.0}, r"heavy_frac \+ method\.recent_frac=0\.0: .*\(0, 1\]"),
        (H2O, {"num_exempt_layers": -1}, r"method\.num_exempt_layers=-1: .*>= 0"),
        (Streaming, {"kept_frac": 0.0}, r"method\.kept_frac=0\.0: .*\(0, 1\]"),
        (Streaming, {"kept_frac": 1.01}, r"method\.kept_frac=1\.01: .*\(0, 1\]"),
        (Streaming, {"num_sinks": -1}, r"method\.num_sinks=-1: .*>= 0"),
        (Streaming, {"num_exempt_layers": -1}, r"method\.num_exempt_layers=-1: .*>= 0"),
        (Oracle, {"alpha": -1.0}, r"method\.alpha=-1\.0: .*>= 0, inf or null"),
        (Oracle, {"max_fetch_frac": 0.0}, r"method\.max_fetch_frac=0\.0: .*\(0, 1\]"),
        (Oracle, {"cap_of": "all"}, r"method\.cap_of=all: .*cached, final"),
        (Oracle, {"fixed_fetch": 0}, r"method\.fixed_fetch=0: .*>= 1 or null"),
        (Oracle, {"num_exempt_layers": -1}, r"method\.num_exempt_layers=-1: .*>= 0"),
        (InfiniGen, {"alpha": math.nan}, r"method\.alpha=nan: .*>= 0, inf or null"),
        (InfiniGen, {"max_fetch_frac": 1.2}, r"method\.max_fetch_frac=1\.2: .*\(0, 1\]"),
        (InfiniGen, {"max_fetch_frac": math.inf}, r"method\.max_fetch_frac=inf: .*\(0, 1\]"),
        (InfiniGen, {"partial_weight_ratio": 0.0}, r"method\.partial_weight_ratio=0\.0: .*\(0, 1\]"),
        (InfiniGen, {"partial_weight_ratio": 1.1}, r"method\.partial_weight_ratio=1\.1: .*\(0, 1\]"),
        (InfiniGen, {"round_columns": "near"}, r"method\.round_columns=near: .*up, down"),
        (InfiniGen, {"columns": "key"}, r"method\.columns=key: .*sum, query, union"),
        (InfiniGen, {"fixed_fetch": -3}, r"method\.fixed_fetch=-3: .*>= 1 or null"),
        (InfiniGen, {"num_exempt_layers": -1}, r"method\.num_exempt_layers=-1: .*>= 0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_what_is_allowed(method, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        method(**settings)
    assert "\n" not in str(caught.value)


def test_what_only_shows_at_a_batch_is_refused_there():
    with pytest.raises(ValueError, match=r"method\.kept_frac=0\.1: .* keeps 4 of 40.*exceed.*num_sinks=4"):
        Streaming(kept_frac=0.1, num_sinks=4).new_state(GEOMETRY, lengths_of([50, 20], [100, 40]))
    with pytest.raises(ValueError, match=r"method\.skew=true: needs a calibration"):
        InfiniGen().new_state(GEOMETRY, lengths_of([20], [40]))


def lengths_of(prompts: list[int], finals: list[int]) -> Lengths:
    return Lengths(torch.tensor(prompts), torch.tensor(finals))


def test_a_method_without_a_size_says_so():
    with pytest.raises(ValueError, match="method Full has no size"):
        Full().with_size(0.5)


def test_labels_are_titles_and_what_makes_another_method_of_it():
    methods = [Full(), H2O(), Streaming(), Oracle(), InfiniGen(), InfiniGen(skew=False), Quest(), SnapKV()]
    names = ["Full cache", "H2O", "Streaming", "Oracle", "InfiniGen", "InfiniGen without skewing", "Quest", "SnapKV"]
    assert [method.label for method in methods] == names
    assert [method.title for method in methods] == [name.removesuffix(" without skewing") for name in names]


def test_budgets_of_the_artifacts_prefill():
    assert H2O(heavy_frac=0.25, recent_frac=0.125).artifact_budget() == 0.375
    assert Streaming(kept_frac=0.3).artifact_budget() == 0.3
    assert InfiniGen(max_fetch_frac=0.4).artifact_budget() == 0.4
    assert Oracle(max_fetch_frac=0.4).artifact_budget() == 0.4
    assert Quest(read_frac=0.4).artifact_budget() == 0.4
    assert Full().artifact_budget() == SnapKV(kept_frac=0.4).artifact_budget() == 1


def chosen(method, scores, positions, final, geometry=None):
    """What `method` selects of one sequence whose slots hold their tokens in order."""
    slots = torch.arange(scores.shape[-1]).expand(1, 1, -1)
    query = torch.empty(1, GROUP * KV_HEADS, positions.shape[1], 0)
    rows = Rows(query, positions, positions >= 0, slots, positions[:, None], lambda: scores)
    return method.select(scores, rows, torch.tensor([final]), geometry or GEOMETRY)


@pytest.mark.parametrize("family, threshold", [("opt", 4), ("llama", 5), ("qwen3", 5)])
def test_alpha_null_is_the_papers(family, threshold):
    """Scores a unit apart, the cap out of the way: the count is the number of units within alpha."""
    scores = -torch.arange(20.0).expand(1, KV_HEADS, GROUP, 1, 20).clone()
    geometry = replace(GEOMETRY, family=family)
    selection = chosen(Oracle(max_fetch_frac=1.0), scores, torch.tensor([[20]]), 40, geometry)
    assert selection.num_read.item() == threshold + 1  # r = -alpha counts
    assert selection.mask.sum(-1).unique().tolist() == [threshold + 1]


# Selection primitives

tied_values = st.sampled_from([-math.inf, -2.0, -1.0, -0.5, 0.0])


@given(st.data(), st.integers(1, 12), st.integers(1, 4))
def test_largest_is_a_sort_with_ties_to_the_lowest_slot(data, slots, rows):
    values = torch.tensor(data.draw(st.lists(tied_values, min_size=2 * rows * slots, max_size=2 * rows * slots)))
    values = values.view(1, 2, rows, slots)
    count = torch.tensor([data.draw(st.lists(st.integers(1, slots + 2), min_size=rows, max_size=rows))])
    mask = largest(values, count)
    for head in range(2):
        for row in range(rows):
            row_values = values[0, head, row].tolist()
            finite = [slot for slot in range(slots) if row_values[slot] > -math.inf]
            ranked = sorted(finite, key=lambda slot: (-row_values[slot], slot))
            wanted = set(ranked[: int(count[0, row])])
            assert set(mask[0, head, row].nonzero().flatten().tolist()) == wanted


def random_scores(seed: int, rows: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of `rows` rows that see the first 1.. slots, and the number that each sees."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(1, KV_HEADS, GROUP, rows, slots, generator=generator)
    cached = torch.randint(1, slots + 1, (1, rows), generator=generator)
    hidden = torch.arange(slots) >= cached[..., None]
    return scores.masked_fill(hidden[:, None, None], -math.inf), cached


alphas = st.one_of(st.just(math.inf), st.floats(0, 20))


@given(seeds, st.integers(1, 30), alphas, positive_fractions)
def test_the_count_lies_between_one_and_the_cap(seed, slots, alpha, frac):
    scores, cached = random_scores(seed, 5, slots)
    selection = chosen(Oracle(alpha=alpha, max_fetch_frac=frac), scores.clone(), cached, slots + 3)
    cap = [max(1, math.floor(frac * t)) for t in cached[0].tolist()]
    counts = selection.num_read[0].tolist()
    assert all(1 <= count <= limit for count, limit in zip(counts, cap, strict=True))
    if alpha == math.inf:
        assert counts == cap
    assert (selection.mask.sum(-1) == selection.num_read[:, None]).all()
    visible = torch.arange(slots) < cached[..., None]
    assert (selection.mask <= visible[:, None]).all()


@given(seeds, st.integers(1, 30), st.lists(st.floats(0, 20), min_size=2, max_size=2), st.tuples(fractions, fractions))
def test_larger_settings_select_supersets(seed, slots, alphas, fracs):
    small_alpha, large_alpha = sorted(alphas)
    small_frac, large_frac = sorted(max(frac, 0.01) for frac in fracs)
    scores, cached = random_scores(seed, 4, slots)

    def mask(alpha, frac):
        return chosen(Oracle(alpha=alpha, max_fetch_frac=frac), scores.clone(), cached, slots + 3).mask

    assert (mask(small_alpha, small_frac) <= mask(large_alpha, small_frac)).all()
    assert (mask(small_alpha, small_frac) <= mask(small_alpha, large_frac)).all()


@given(seeds, st.integers(1, 30), st.integers(1, 40))
def test_fixed_fetch_is_that_many_or_all(seed, slots, fixed):
    scores, cached = random_scores(seed, 4, slots)
    selection = chosen(Oracle(fixed_fetch=fixed, alpha=0.0, max_fetch_frac=0.01), scores, cached, slots)
    assert selection.num_read[0].tolist() == [min(fixed, t) for t in cached[0].tolist()]


REDUCTIONS = {
    "best": lambda s: (s - s.amax(-1, keepdim=True)).amax(0),
    "max_logits": lambda s: s.amax(0),
    "sum_logits": lambda s: s.mean(0),  # a mean ranks as the sum does
    "max_probs": lambda s: s.softmax(-1).amax(0),
    "sum_probs": lambda s: s.softmax(-1).mean(0),
}


@pytest.mark.parametrize("covers", ["kv_head", "layer"])
@pytest.mark.parametrize("group", GROUPS)
def test_a_groups_heads_are_reduced_as_the_setting_says(group, covers):
    """Against each rule on one row at a time, with sinks and recent tokens among the 8 of 20 that are read."""
    scores = 3 * torch.randn(1, KV_HEADS, GROUP, 1, 20, generator=torch.Generator().manual_seed(5))
    method = Oracle(alpha=math.inf, max_fetch_frac=0.4, group=group, covers=covers, num_sinks=2, recent_frac=0.25)
    selection = chosen(method, scores.clone(), torch.tensor([[20]]), 40)
    forced = {0, 1, 18, 19}
    heads = scores[0, :, :, 0].double()
    heads = heads.flatten(0, 1)[None] if covers == "layer" else heads

    def best(values):
        order = sorted(set(range(20)) - forced, key=lambda token: -values[token])
        return forced | set(order[:4])

    for head, mask in zip(heads, selection.mask[0, :, 0], strict=True):
        sets = [best(row) for row in head] if group == "union" else [best(REDUCTIONS[group](head))]
        assert set(mask.nonzero().flatten().tolist()) == set.union(*sets)
    assert selection.num_read.item() == selection.mask[0, :, 0].sum(-1).double().mean().item()


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (Oracle, {"group": "median"}, "method.group=median: must be one of best, "),
        (Oracle, {"covers": "model"}, "method.covers=model: must be one of kv_head, layer"),
        (Quest, {"when": "layer"}, "method.when=layer: must be one of previous_step, previous_layer, own_query"),
        (Oracle, {"group": "sum_probs"}, "method.group=sum_probs: must be best, the distance that alpha bounds"),
        (Quest, {"num_sinks": -1}, "method.num_sinks=-1: must be an integer >= 0"),
        (Quest, {"recent_frac": 1.5}, r"method.recent_frac=1.5: must be in \[0, 1\]"),
        (Quest, {"read_tokens": 0}, "method.read_tokens=0: must be >= 1 or null"),
        (Quest, {"own_query_layers": -1}, "method.own_query_layers=-1: must be an integer >= 0"),
        (InfiniGen, {"pool_frac": 0.5, "covers": "layer"}, "method.covers, method.group=layer, best: must be kv_head"),
    ],
)
def test_settings_of_a_selection_without_meaning_are_refused(method, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        method(**settings)


def test_a_limited_pool_reads_a_share_of_what_it_holds():
    method = InfiniGen(alpha=math.inf, max_fetch_frac=0.3, pool_frac=0.4)
    row = Row(90, 50, 100)
    assert method.tokens_read(row, 3) == method.max_tokens_read(row, 3) == 12  # floor(.3 * 40)


def test_sinks_leave_something_to_select():
    lengths = Lengths(torch.tensor([100]), torch.tensor([120]))
    method = Quest(read_frac=0.2, page_size=1, num_sinks=20)
    with pytest.raises(
        ValueError, match="^method.num_sinks=20: must be below 19, what is read of a prompt of 100 token"
    ):
        method.new_state(GEOMETRY, lengths)
    least = method.min_size(Row(100, 100, 120))
    assert least == pytest.approx(0.22, abs=1e-6)
    method.with_size(least).new_state(GEOMETRY, lengths)


def test_a_share_or_a_number_of_tokens_is_read():
    assert Quest(read_tokens=32, page_size=4).tokens_read(Row(200, 100, 300), 2) == 28  # the last page is one of 8
    assert Quest(read_tokens=32, page_size=4).with_size(0.5) == Quest(read_frac=0.5, page_size=4)
    assert Quest(group="union").tokens_read(Row(200, 100, 300), 2) is None
    assert Quest(group="union").max_tokens_read(Row(200, 100, 300), 2) == 200


# Selections of a state, over random tensors


def decode(method, length: int, prompt: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer's state over a sequence: mask [num_kv_heads, rows, slots] and count [rows] of its decode rows."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, KV_HEADS * GROUP, length, HEAD_DIM, generator=generator)
    key = torch.randn(1, KV_HEADS, length, HEAD_DIM, generator=generator)
    calibration = {"rotation": torch.eye(HEAD_DIM).expand(1, KV_HEADS, -1, -1)}
    state = method.new_state(GEOMETRY, lengths_of([prompt], [length]), calibration)
    real = torch.ones(1, prompt, dtype=torch.bool)
    state.prompt(0, query[:, :, :prompt], key[:, :, :prompt], key[:, :, :prompt], PromptRows(real, length))
    positions = torch.arange(prompt, length)[None]
    state.append(0, key[:, :, prompt:], key[:, :, prompt:], positions, slice(prompt, length))
    grouped = query[:, :, prompt:].reshape(1, KV_HEADS, GROUP, -1, HEAD_DIM)
    scores = GEOMETRY.scale * grouped @ key.unsqueeze(2).transpose(-1, -2)
    hidden = torch.arange(length) > positions[..., None]
    rows = Rows(
        query=query[:, :, prompt:],
        positions=positions,
        real=torch.ones_like(positions, dtype=torch.bool),
        slot_positions=torch.arange(length, dtype=torch.int32)[None, None],
        own_slots=positions[:, None],
        true_scores=lambda: scores.masked_fill(hidden, -math.inf),
    )
    selection = state.select(0, rows)
    return selection.mask[0].expand(KV_HEADS, -1, -1), selection.num_read[0]


lengths = st.integers(2, 40).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length - 1)))
methods = st.one_of(
    st.builds(
        lambda total, share: H2O(heavy_frac=total * share, recent_frac=total * (1 - share)),
        positive_fractions,
        fractions,
    ),
    st.builds(lambda frac: Streaming(kept_frac=frac, num_sinks=0), positive_fractions),
    st.builds(lambda frac: Oracle(alpha=math.inf, max_fetch_frac=frac), positive_fractions),
    st.builds(lambda fixed: InfiniGen(fixed_fetch=fixed), st.integers(1, 50)),
    st.builds(lambda frac: InfiniGen(alpha=math.inf, max_fetch_frac=frac, skew=False), positive_fractions),
    st.builds(lambda frac: InfiniGen(alpha=math.inf, max_fetch_frac=frac, cap_of="final"), positive_fractions),
    st.builds(lambda frac, size: Quest(read_frac=frac, page_size=size), positive_fractions, st.integers(1, 7)),
    st.builds(
        lambda kept, window: SnapKV(kept_tokens=window + kept, window=window, num_exempt_layers=0),
        *[st.integers(1, 9)] * 2,
    ),
    st.builds(lambda kept: TOVA(kept_tokens=kept), st.integers(1, 30)),
)


@given(methods, lengths, seeds)
def test_the_closed_form_is_what_is_read(method, shape, seed):
    length, prompt = shape
    assume(not isinstance(method, Streaming) or int(method.kept_frac * length) > 0)
    mask, count = decode(method, length, prompt, seed)
    rows = [Row(cached, prompt, length) for cached in range(prompt, length)]
    expected = [method.tokens_read(row, 0) for row in rows]
    assert count.tolist() == expected
    assert mask.sum(-1).tolist() == [expected] * KV_HEADS
    assert [method.max_tokens_read(row, 0) for row in rows] == expected
    assert all(read <= method.tokens_kept(row, 0) <= row.cached for read, row in zip(expected, rows, strict=True))


def test_the_closed_form_of_alpha_is_none():
    row = Row(100, 50, 200)
    assert InfiniGen().tokens_read(row, 3) is None
    assert Oracle(alpha=4.0).tokens_read(row, 3) is None
    assert Full().tokens_read(row, 3) == 100


def test_the_cap_is_a_share_of_what_is_cached_or_of_the_final_length():
    """Of 20 cached tokens of 40, and of 8: floor(0.3 * 20) = 6, floor(0.3 * 40) = 12, never more than there are."""
    for cap_of, expected in (("cached", [6, 2]), ("final", [12, 8])):
        method = InfiniGen(alpha=math.inf, max_fetch_frac=0.3, cap_of=cap_of)
        assert [method.tokens_read(Row(cached, 5, 40), 2) for cached in (20, 8)] == expected
        scores = torch.randn(1, KV_HEADS, GROUP, 2, 20, generator=torch.Generator().manual_seed(0))
        scores[..., 1, 8:] = -math.inf
        selection = chosen(method, scores, torch.tensor([[20, 8]]), 40)
        assert selection.num_read.tolist() == [expected]
        assert selection.mask.sum(-1).tolist() == [[expected] * KV_HEADS]
    tiny = InfiniGen(alpha=math.inf, max_fetch_frac=0.01, cap_of="final")
    assert tiny.tokens_read(Row(20, 5, 40), 2) == 1, "at least one"
    by_alpha = InfiniGen(alpha=2.5, max_fetch_frac=0.3, cap_of="final")
    steps = -torch.arange(20.0).expand(1, KV_HEADS, GROUP, 1, 20).clone()
    assert chosen(by_alpha, steps, torch.tensor([[20]]), 40).num_read.item() == 3
    assert by_alpha.max_tokens_read(Row(20, 5, 40), 2) == 12


@given(positive_fractions, fractions, lengths, seeds)
def test_h2o_keeps_its_budget_and_the_recent(total, share, shape, seed):
    length, prompt = shape
    method = H2O(heavy_frac=total * share, recent_frac=total * (1 - share))
    mask, _ = decode(method, length, prompt, seed)
    recent = int(method.recent_frac * length)
    budget = max(1, int(method.heavy_frac * length) + recent)
    gone = torch.zeros(KV_HEADS, length, dtype=torch.bool)
    for row, cached in enumerate(range(prompt, length)):
        read = mask[:, row]
        assert (read.sum(-1) == min(cached, budget)).all()
        assert not read[:, cached:].any()
        assert read[:, max(0, cached - recent) : cached].all(), "a recent token is missing"
        assert not (read & gone).any(), "an evicted token came back"
        gone[:, :cached] |= ~read[:, :cached]


@given(positive_fractions, st.integers(0, 6), lengths)
def test_streaming_reads_sinks_and_a_window(frac, num_sinks, shape):
    length, prompt = shape
    window = int(frac * length)
    assume(window > num_sinks)
    mask, _ = decode(Streaming(kept_frac=frac, num_sinks=num_sinks), length, prompt, 0)
    for row, cached in enumerate(range(prompt, length)):
        sinks = set(range(min(num_sinks, cached)))
        recent = set(range(max(0, cached - (window - num_sinks)), cached))
        assert set(mask[0, row].nonzero().flatten().tolist()) == sinks | recent
        assert len(sinks | recent) == min(window, cached)


# Columns


def plain_columns(query, key, real, basis, method) -> set[int]:
    """Step 2 for one sequence and KV head. query [group, prompt, d]; key [prompt, d]; returns column indices."""
    by_query, by_key = [0.0] * HEAD_DIM, [0.0] * HEAD_DIM
    for t in range(len(real)):
        for column in range(HEAD_DIM if real[t] else 0):
            by_key[column] += abs(float(key[t] @ basis[:, column]))
            for head in query:
                by_query[column] += abs(float(head[t] @ basis[:, column])) / len(query)
    rounded = {"up": math.ceil, "down": math.floor}[method.round_columns]
    wanted = max(1, rounded(method.partial_weight_ratio * HEAD_DIM))

    def top(values):
        return set(sorted(range(HEAD_DIM), key=lambda column: -values[column])[:wanted])

    if method.columns == "union":
        return top(by_query) | top(by_key)
    if method.columns == "query":
        return top(by_query)
    return top([q + k for q, k in zip(by_query, by_key, strict=True)])


@settings(max_examples=40)
@given(st.sampled_from(COLUMN_RULES), st.sampled_from(["up", "down"]), positive_fractions, st.integers(1, 9), seeds)
def test_columns_are_the_plain_ones(rule, rounding, ratio, prompt, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, KV_HEADS * GROUP, prompt, HEAD_DIM, generator=generator)
    key = 2 * torch.randn(2, KV_HEADS, prompt, HEAD_DIM, generator=generator)
    basis = torch.linalg.qr(torch.randn(KV_HEADS, HEAD_DIM, HEAD_DIM, generator=generator)).Q
    real = torch.ones(2, prompt, dtype=torch.bool)
    real[1, : prompt // 2] = False
    method = InfiniGen(columns=rule, partial_weight_ratio=ratio, round_columns=rounding)
    chosen = choose_columns(query, key, real, basis, method)
    for sequence in range(2):
        for head in range(KV_HEADS):
            group = query[sequence, head * GROUP : (head + 1) * GROUP]
            wanted = plain_columns(group, key[sequence, head], real[sequence], basis[head], method)
            got = [column for column in chosen[sequence, head].T.tolist() if any(column)]
            assert sorted(got) == sorted(basis[head][:, sorted(wanted)].T.tolist())


@pytest.mark.parametrize(
    ("head_dim", "ratio", "up", "down"), [(4, 0.3, 2, 1), (4, 0.1, 1, 1), (64, 0.3, 20, 19), (64, 0.5, 32, 32)]
)
def test_a_fraction_of_a_column_is_rounded_as_the_setting_says(head_dim, ratio, up, down):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 9, head_dim, generator=generator) for heads in (KV_HEADS * GROUP, KV_HEADS))
    for rounding, expected in (("up", up), ("down", down)):
        method = InfiniGen(partial_weight_ratio=ratio, round_columns=rounding)
        basis = torch.eye(head_dim).expand(KV_HEADS, -1, -1)
        chosen = choose_columns(query, key, torch.ones(1, 9, dtype=torch.bool), basis, method)
        assert chosen.shape == (1, KV_HEADS, head_dim, expected)


@pytest.mark.parametrize("rule", COLUMN_RULES)
@pytest.mark.parametrize(("prompt", "magnitude"), [(32_768, 10.0), (9, 2e4)], ids=["long", "large"])
def test_the_importance_of_columns_overflows_in_no_half_precision(rule, prompt, magnitude):
    """Sums beyond 65504, fp16's largest number: all columns would tie at infinity."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.4, 1, 8)[torch.randperm(8, generator=generator)] * magnitude
    signs = torch.randn(2, KV_HEADS * GROUP, prompt, 8, generator=generator).sign()
    query = (signs * spread).half()
    key = (signs[:, :KV_HEADS] * spread.flip(-1)).half()
    real = torch.ones(2, prompt, dtype=torch.bool)
    real[1, :4] = False
    basis = torch.eye(8, dtype=torch.float16).expand(KV_HEADS, -1, -1)
    method = InfiniGen(columns=rule)
    got = choose_columns(query, key, real, basis, method)
    assert got.dtype == torch.float16 and float(query.abs().sum(2, dtype=torch.float32).min()) > 65_504
    assert torch.equal(got.float(), choose_columns(query.float(), key.float(), real, basis.float(), method))


def test_slots_without_a_token_are_never_visible():
    rows = Rows(
        query=torch.empty(0),
        positions=torch.tensor([[0, 3]]),
        real=torch.ones(1, 2, dtype=torch.bool),
        slot_positions=torch.tensor([[[0, EMPTY, 2, 3]]]),
        own_slots=torch.tensor([[[0, 3]]]),
        true_scores=lambda: torch.empty(0),
    )
    assert rows.visible().tolist() == [[[[False] * 4, [True, False, True, False]]]]
