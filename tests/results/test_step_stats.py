"""What a serving engineer reads: percentiles, rates, utilisation and hit rates computed by hand; one definition for
timed runs, generated texts and attached models."""

import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from harness.api.cached_model import CachedModel
from harness.decode.gpu_cache import GpuCacheFetcher
from harness.decode.links import CudaLink, LinkUse
from harness.decode.session import LiveSession
from harness.decode.timeline import StepClock
from harness.results.step_stats import stats_of, times_of
from tests.cases import CASES
from tests.fake_cuda import CUDA, Event, Stream, fake_streams
from tests.living import attached_with_link, calibration_of, setup_of

STEPS = [0.04, 0.01, 0.02, 0.03, 0.1]


def test_times_of_five_steps_by_hand():
    times = times_of(0.5, STEPS, batch_size=3)
    assert times == {
        "ttft_s": 0.5,
        "decode_s": pytest.approx(0.2),
        "tokens_per_s": pytest.approx(3 * 6 / 0.7),
        "decode_tokens_per_s": pytest.approx(3 / 0.04),
        "sequence_tokens_per_s": pytest.approx(25),
        "tpot_p50_s": 0.03,
        "tpot_p95_s": pytest.approx(0.04 + 0.8 * 0.06),  # place 0.95 * 4 = 3.8 of the ordered five
        "tpot_p99_s": pytest.approx(0.04 + 0.96 * 0.06),
        "tpot_std_s": pytest.approx((0.005 / 4) ** 0.5),  # squared distances: 0, 9, 4, 1, 36 times 1e-4
    }
    longer = times_of(0.5, STEPS, batch_size=3, num_steps=10)
    assert longer["decode_s"] == pytest.approx(0.4) and longer["tokens_per_s"] == pytest.approx(3 * 11 / 0.9)
    assert times_of(0.5, [0.25], batch_size=1)["tpot_std_s"] is None
    assert times_of(0.5, [], batch_size=1) == {"ttft_s": 0.5, "decode_s": 0.0}


@pytest.mark.parametrize("kept", [256, 0])
def test_a_link_is_busy_while_a_transfer_lies_in_the_span(monkeypatch, kept):
    """kept: sums as it goes or at the end. The second transfer begins before the span and the last ends after it."""
    monkeypatch.setattr("harness.decode.links.TRANSFERS_KEPT", kept)
    waits, clock = [], SimpleNamespace(at=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.at)
    use = LinkUse(SimpleNamespace(device=torch.device("cpu"), drain=lambda: waits.append("drain")))
    clock.at = 10.0
    use.begin()
    for start, end in ((7.0, 8.0), (9.0, 11.0), (12.0, 13.0), (13.0, 13.5)):
        use.add(start, end)
    for moment in (14.0, 15.0):
        clock.at = moment
        use.mark()
    use.add(14.5, 16.0)
    use.add(16.0, 18.0)
    clock.at = 20.0
    assert not waits
    assert use.busy_s == pytest.approx(1.0 + 1.5 + 0.5) and use.span_s == 5.0
    assert use.busy_s == pytest.approx(3.0), "as often as one asks"
    use.mark()  # a step later
    assert use.busy_s == pytest.approx(1.0 + 1.5 + 3.5) and use.span_s == 10.0


class CountedEvent(Event):
    """An event of CUDA whose time is how many were recorded before it."""

    numbers = count()

    def record(self, stream=None) -> None:
        super().record(stream)
        self.at = next(CountedEvent.numbers)

    def elapsed_time(self, other) -> float:
        return 1e3 * (other.at - self.at)


def test_under_cuda_events_tell_how_busy_the_link_is_and_how_long_a_step_takes(monkeypatch):
    with fake_streams():
        monkeypatch.setattr(torch.cuda, "Event", CountedEvent)
        monkeypatch.setattr(CountedEvent, "numbers", count())
        link, clock = CudaLink(CUDA), StepClock(CUDA)
        use = link.open_use()  # 0
        clock.begin_prompt()  # 1
        link.start(lambda: 8, [])  # from 2 to 3: of the prompt
        clock.mark()  # 4
        use.begin()  # 5
        for _ in range(2):
            link.start(lambda: 8, [])  # from 6 to 7, from 10 to 11
            clock.mark()  # 8, 12
            use.mark()  # 9, 13
        link.start(lambda: 8, [])  # from 14 to 15: for a step that does not come
        assert Stream.waits == [], "who decodes does not wait"
        assert (use.busy_s, use.span_s) == (2, 8)
        assert (clock.ttft_s, clock.step_s) == (3, [4, 4])
        use.close()
        link.start(lambda: 8, [])  # without a use its start is no event
        assert next(CountedEvent.numbers) == 17


# Rows that were there


def counted_rows(monkeypatch) -> dict[str, int]:
    """Rows that selections read and that their layer's buffer holds before, counted one by one."""
    counts = {"read": 0, "found": 0}
    request = GpuCacheFetcher.request_selected

    def request_selected(self, mask, most, tokens):
        for sequence, of_sequence in enumerate(mask.tolist()):
            for head, of_head in enumerate(of_sequence):
                there = set(self.gpu_cache.slots[sequence, head].tolist()) - {-1}
                wanted = {slot for slot, is_read in enumerate(of_head) if is_read}
                counts["read"] += len(wanted)
                counts["found"] += len(wanted & there)
        return request(self, mask, most, tokens)

    monkeypatch.setattr(GpuCacheFetcher, "request_selected", request_selected)
    return counts


@pytest.mark.parametrize("lengths", [(24,), (24, 17)], ids=["alone", "padded"])
@pytest.mark.parametrize("name", ["infinigen", "quest"])
def test_the_hit_rate_is_that_of_rows_counted_one_by_one(monkeypatch, name, lengths):
    counts, case, steps = counted_rows(monkeypatch), CASES[name], 7
    with attached_with_link() as (attached, link):
        real = torch.arange(24) >= 24 - torch.tensor(lengths)[:, None]
        ids = torch.randint(3, 200, real.shape)
        session = LiveSession(
            attached, case.method, max_new_tokens=steps + 1, placement="host", link=link, gpu_cache=1,
            calibration=calibration_of(attached),
        )  # fmt: skip
        logits = session.prefill(ids, real)
        for _ in range(steps):
            logits = session.decode_step(logits.argmax(-1))
        stats = stats_of(session)
        loaded = int(session.traffic.loaded.num_rows)
        session.close()
    read_densely = sum(length + step for length in lengths for step in range(steps))
    read_densely *= case.method.dense_layers * attached.geometry.num_kv_heads
    assert 0 < counts["found"] < counts["read"]
    assert stats.hit_rate == pytest.approx(counts["found"] / (counts["read"] + read_densely))
    if len(lengths) == 1:
        assert loaded == counts["read"] + read_densely - counts["found"], "what is not there crosses the link"


@pytest.mark.parametrize("placement", ["host", "device"])
def test_an_attached_model_tells_the_time_between_tokens(placement):
    """The marks are made by the steps; a program that takes its time between two calls finds it in TPOT."""
    pause = 0.05
    with attached_with_link() as (attached, link), CachedModel(
        attached, setup_of(attached, CASES["infinigen"]), {"placement": placement, "link": link}, max_new_tokens=8
    ):  # fmt: skip
        output = attached.model(torch.randint(3, 200, (2, 20)), use_cache=True)
        for _ in range(3):
            time.sleep(pause)
            output = attached.model(torch.full((2, 1), 5), past_key_values=output.past_key_values)
        usage = output.past_key_values.usage
    assert usage.steps == 3 and pause <= usage.tpot_p50_s and 3 * pause <= usage.decode_s
    assert usage.tokens_per_s == pytest.approx(2 * 4 / (usage.ttft_s + usage.decode_s))
    assert usage.device_kv_bytes > 0
    if placement == "host":
        assert 0 < usage.link_utilisation <= 1.0001 and usage.hit_rate == 0 < usage.host_kv_bytes
    else:
        assert usage.link_utilisation is usage.hit_rate is None and usage.host_kv_bytes == 0
