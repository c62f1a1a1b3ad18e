"""The cache on a local disk: the device's bits, bytes counted by hand, refusals, nothing left behind."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cases import CASES, SHIPPED, shipped
from living import PROMPTS, calibration_of, live, make_store, open_live, tiny

from harness.errors import UserError
from harness.live import disk as disks
from harness.live.disk import BLOCK_BYTES, Disk, file_system
from harness.live.disk_store import DiskStore, Lines
from harness.live.links import DiskLink
from harness.live.store import RowFormat, chosen
from harness.model.attach import attach
from methods.codec import Codec

PADDED = PROMPTS["padded"]
ON_DEVICE = [name for name in CASES if CASES[name].method.when != "true_scores" and not CASES[name].method.replay_only]
CPU = torch.device("cpu")


def has_disk() -> str:
    """Why the folder of temporary files cannot be measured; empty where it can."""
    try:
        Disk("/tmp").close()
    except UserError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(has_disk()), reason=has_disk() or "a disk")


@contextmanager
def attached_with_disk(folder, family="gqa", **options):
    with attach(tiny(family)) as attached, DiskLink(Disk(folder), **options) as link:
        yield attached, link


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_disk_is_device_bit_for_bit(name, layout, tmp_path):
    with attached_with_disk(tmp_path, layout=layout, gap_blocks=1) as (attached, link):
        expected = live(attached, CASES[name], PADDED, placement="device")
        got = live(attached, CASES[name], PADDED, placement="disk", link=link)
    assert torch.equal(got.logits, expected.logits)
