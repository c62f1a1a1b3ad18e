"""The cache on a local disk: the device's bits, bytes counted by hand, refusals, nothing left behind."""

import errno
import fcntl
import os
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.decode import disk as disks
from harness.decode.disk import BLOCK_BYTES, Disk, DiskFile, DiskStore
from harness.decode.links import DiskLink, EmulatedLink
from harness.decode.store import RowFormat, chosen
from harness.errors import UserError
from harness.model.attach import attach
from harness.replay.setup import Setup
from harness.run.cli import main
from harness.run.compose import load
from harness.settings.codecs import codec_named
from harness.speed.link_rate import disk_rate
from harness.speed.timed_run import TimedRun, run_shared_prompt, time_run
from methods.full import Full
from tests.cases import CASES, shipped
from tests.living import PROMPTS, live, make_store, tiny
from tests.runs import rows_at, tiny_loaded

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A folder on a disk, which is empty at the end."""
    try:
        Disk(tmp_path).close()
    except UserError as error:
        pytest.skip(str(error))
    yield tmp_path
    assert [*tmp_path.iterdir()] == []


@contextmanager
def attached_with_disk(folder, family="gqa", **options):
    with attach(tiny(family)) as attached, DiskLink(Disk(folder), **options) as link:
        yield attached, link


# Bit for bit


CROSSING = (
    "full", "int4", "h2o", "infinigen", "quest", "pool-counter", "kivi", "layers-residual", "shadowkv", "snapkv-both",
    "kvzip",
)  # fmt: skip
"""A case of each kind of cache."""
AS_SHIPPED = ("infinigen2", "fp8", "int4-hadamard", "kvarn", "blockgtq3", "nvfp4", "turboquant3")


@pytest.mark.parametrize(
    ("case", "prompts"),
    [*((CASES[name], PROMPTS["padded"]) for name in CROSSING), *((shipped(name), (200, 180)) for name in AS_SHIPPED)],
    ids=[*CROSSING, *AS_SHIPPED],
)
def test_disk_is_device(case, prompts, folder):
    with attached_with_disk(folder) as (attached, link):
        expected = live(attached, case, prompts, placement="device")
        got = live(attached, case, prompts, placement="disk", link=link)
    assert torch.equal(got.logits, expected.logits)


@pytest.mark.parametrize(("name", "rows"), [("infinigen", 2), ("pool-counter", 1), ("quest", 1.5)])
def test_rows_may_stay_on_the_device(name, rows, folder):
    """As from host memory, whose rows lie in the same order of their arrival."""
    with attached_with_disk(folder, overlap=False) as (attached, link), EmulatedLink(1e12) as memory:
        expected = live(attached, CASES[name], (24, 24), placement="host", link=memory, gpu_cache=rows)
        got = live(attached, CASES[name], (24, 24), placement="disk", link=link, gpu_cache=rows)
    assert torch.equal(got.logits, expected.logits)
    assert got[1:] == expected[1:]


# A store against one in memory


@contextmanager
def two_stores(folder, codec, head_dim):
    """The same slots on the disk and in memory: 2 sequences, 3 KV heads, 50 tokens."""
    shape = {"batch": 2, "num_kv_heads": 3, "capacity": 50}
    stored = RowFormat(codec_named(codec), head_dim, torch.float32)
    on_disk = DiskStore(stored, device=CPU, **shape)
    in_memory = make_store(head_dim, codec, **shape)
    in_memory.clear()
    with closing(Disk(folder)) as disk:
        on_disk.allocate(disk)
        yield on_disk, in_memory
        on_disk.free()


@pytest.mark.parametrize(
    ("codec", "head_dim"), [("fp32", 64), ("int4", 64), ("int8", 36), ("fp32", 700)], ids=["512", "72", "88", "5600"]
)
def test_any_order_of_writes_and_reads_is_a_memorys(codec, head_dim, folder):
    """Rows of a divisor of a block, of none, and of more than one."""
    draw = torch.Generator().manual_seed(7)

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    with two_stores(folder, codec, head_dim) as (on_disk, in_memory):
        size = on_disk.slot_bytes
        for step in range(60):
            begin, count = (int(numbers(0, 51, 1)) for _ in "12")
            begin, end = min(begin, count), max(begin, count)
            slots = torch.stack([torch.randperm(50, generator=draw)[:7] for _ in range(6)]).view(2, 3, 7)
            slots = torch.where(numbers(0, 4, 2, 3, 7) == 0, -1, slots)
            if step % 3 < 2:
                at = chosen(slots) if step % 2 else begin
                num_rows = 7 if step % 2 else end - begin
                rows = numbers(0, 256, 2, 3, num_rows, size).to(torch.uint8)
                for store in (on_disk, in_memory):
                    store.write(rows, at)
            requests = [(end, end), (slice(begin, end), end - begin), (chosen(slots), 7)]
            targets = torch.stack([torch.randperm(9, generator=draw)[:7] for _ in range(6)]).view(2, 3, 7)
            requests.append((chosen(slots, targets), 9))
            for request, num_rows in requests:
                got, expected = (store.rows_in(store.new_buffer(num_rows), num_rows) for store in (on_disk, in_memory))
                on_disk.load(request, got[:, :, :num_rows])
                in_memory.load(request, expected[:, :, :num_rows])
                assert torch.equal(got, expected)


# Bytes by hand: rows of 512 bytes, 8 a block


def test_bytes_are_those_of_whole_blocks(folder):
    with two_stores(folder, "fp32", 64) as (store, _):
        rows = torch.zeros(2, 3, 20, 512, dtype=torch.uint8)
        assert store.write(rows, 0) == 6 * 2 * BLOCK_BYTES, "16 of 20 tokens fill blocks"
        one = rows[:, :, :1]
        assert [store.write(one, 20 + number) for number in range(6)] == [0, 0, 0, 0, 6 * BLOCK_BYTES, 0]
        assert store.load(16, rows[:, :, :16]) == 6 * 2 * BLOCK_BYTES
        assert store.load(26, torch.zeros(2, 3, 26, 512).byte()) == 6 * 3 * BLOCK_BYTES, "the open block is in memory"

        slots = torch.full((2, 3, 3), -1)
        slots[0, 1] = torch.tensor([3, 0, 17])  # two in block 0, one in block 2
        buffer = torch.zeros(2, 3, 3, 512, dtype=torch.uint8)
        assert store.load(chosen(slots), buffer) == 3 * BLOCK_BYTES, "and the one between them"
        assert store._joined(np.array([0, 5, 11])).tolist() == [0, 1, 2, 3, 4, 5, 11], "a gap of four, one of five"
        before = store.file.disk.bytes_read
        assert store.write(buffer, chosen(slots)) == 6 * BLOCK_BYTES, "the blocks that were open"
        assert store.file.disk.bytes_read - before == 2 * BLOCK_BYTES, "two are read to be changed"


def test_a_step_counts_the_blocks_that_it_waited_for(folder):
    """4 KV heads in all, rows of 128 bytes, so that 32 tokens are a block."""
    with attached_with_disk(folder) as (attached, link):
        prompt = run_shared_prompt(attached, torch.arange(3, 99).view(2, 48))
        shape = load(["experiment=latency", "gen_len=8", "warmup_steps=1", "timed_steps=6", "repeats=1"]).latency
        timing = time_run(attached, prompt, TimedRun(Setup(Full(), None, None), shape, "disk"), link=link)
        num_layers = len(attached.layers)
    # 48 tokens and the step's: a stored block and an open one for each of 4 heads
    assert timing.metrics["disk_read_bytes"] == 7 * num_layers * 4 * BLOCK_BYTES
    assert timing.metrics["h2d_bytes"] == 7 * num_layers * 4 * 128 * sum(range(49, 55)) // 6
    assert timing.metrics["read_amplification"] == pytest.approx(BLOCK_BYTES / (128 * sum(range(49, 55)) / 6))
    crossed = timing.samples["timed_disk_read_bytes"] + timing.samples["timed_d2h_bytes"]
    busy_s = timing.metrics["link_utilisation"] * sum(timing.samples["step_s"][0])
    assert timing.metrics["link_bytes_per_s"] == pytest.approx(crossed / busy_s, rel=0.3)
    assert timing.metrics["disk_kv_bytes"] == num_layers * 4 * 2 * BLOCK_BYTES, "56 tokens"
    assert timing.metrics["host_kv_bytes"] == 0


def test_the_rate_is_measured(folder):
    with closing(Disk(folder)) as disk:
        assert disk_rate(disk).bytes_per_s > 1e6
        assert disk.bytes_read == 5 * disk.bytes_written + BLOCK_BYTES, "a block asks whether the disk can be used"


# Refusals


def refusal(folder, num_blocks=1):
    with pytest.raises(UserError) as found:
        DiskFile(Disk(folder), num_blocks)
    message = str(found.value)
    assert message.startswith(f"platform.disk_dir={folder}: ") and "\n" not in message
    return message


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    assert "no file can be used there (FileNotFoundError" in refusal(tmp_path / "no")
    assert "no file can be used there (NotADirectoryError" in refusal(tmp_path / "file")


@pytest.mark.skipif(disks.file_system(Path("/dev/shm")) != "tmpfs", reason="/dev/shm is no tmpfs here")
def test_a_folder_in_memory():
    assert "tmpfs, which lies in memory" in refusal(Path("/dev/shm"))


def test_a_disk_without_space(folder):
    assert "GiB that are free there; lower batch_size" in refusal(folder, 2**40)


def test_a_file_system_that_answers_from_memory_alone(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert "refuses O_DIRECT, without which memory would be measured" in refusal(folder)


def test_a_failing_disk_ends_the_run_in_one_line(folder, monkeypatch):
    with attached_with_disk(folder) as (attached, link):

        def broken(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(UserError, match=r"platform.disk_dir=.*Input/output error"):
            live(attached, CASES["full"], (40, 40), placement="disk", link=link)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["placement=disk", "platform=cuda"], "placement=disk: needs platform=cpu"),
        (["placement=disk", "platform.link_gbps=1"], "platform.link_gbps=1: placement=disk has the disk's own rate"),
        (["placement=disk", "platform.weights_on_device=0.5"], "platform.weights_on_device=0.5: no weights cross"),
        (["platform.disk_dir=/"], "platform.disk_dir=/: is for placement=disk alone"),
        (["placement=disk", "platform.disk_dir=/no/such"], "platform.disk_dir=/no/such: no such folder"),
    ],
)
def test_settings_without_meaning(words, says):
    with pytest.raises(UserError, match=says):
        load(["experiment=latency", *words])


def test_a_systems_label_makes_a_record_of_what_was_measured(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr("harness.model.load.load_model", lambda config: tiny_loaded())
    results = tmp_path_factory.mktemp("results")
    shape = ["prompt_len=40", "gen_len=8", "warmup_steps=1", "timed_steps=3", "repeats=1", "batch_size=2"]
    words = ["experiment=disk", "sweep=null", "system=infinigen2+rows", f"platform.disk_dir={folder}"]
    assert main([*words, f"results_dir={results}", *shape]) == 0
    (row,) = rows_at(results / "tables/disk.csv")
    assert (row["source"], row["label"]) == ("measured", "disk+infinigen2+rows")
    assert row["disk_read_bytes"] > row["h2d_bytes"] > 0 and row["hit_rate"] > 0
