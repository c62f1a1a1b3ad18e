"""What the benchmark found: measurements with unit and spread, timed cells as rows of a table, and what is missing."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from harness.files import write_atomic
from harness.records import code, environment
from harness.settings.systems import LABELS
from harness.speed.run import SOURCES
from harness.tables.columns import TableRow
from harness.tables.speed import TIMED_CELLS
from harness.tables.write import write_figures, write_table

SCHEMA = 1


class Measurement(NamedTuple):
    """value: the median of `num_samples`; low, high: the least and the greatest. at: the conditions."""

    part: str
    name: str
    at: dict[str, Any]
    unit: str
    value: float
    low: float
    high: float
    num_samples: int


Kind = Literal["failed", "skipped", "not applicable"]


class Gap(NamedTuple):
    """A part, or a cell, without a result, and why."""

    part: str
    kind: Kind
    reason: str


@dataclass
class Report:
    """Filled part by part, and written after each, so that a run that is killed leaves what it has."""

    out: Path
    device: torch.device
    minutes: float
    environment: dict[str, Any]
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)
    rows: list[TableRow] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def source(self) -> str:
        """`measured` under CUDA, else `emulated`."""
        return SOURCES[self.device.type]

    def add(self, part: str, at: dict[str, Any], name: str, unit: str, samples: Sequence[float]) -> Measurement:
        """A measurement of what was sampled at least once."""
        value, low, high = statistics.median(samples), min(samples), max(samples)
        self.measurements.append(Measurement(part, name, at, unit, value, low, high, len(samples)))
        return self.measurements[-1]

    def add_cell(self, model: str, label: str, metrics: Mapping[str, Any]) -> None:
        """A timed cell as a row of the latency tables."""
        cell = {"experiment": TIMED_CELLS, "platform": self.device.type, "source": self.source, "model": model}
        cell |= {"method": LABELS[label].method, "label": label, "settings": ""}
        run = f"{self.out.name}-{model}-{metrics['batch_size']}x{metrics['prompt_len']}-{label}"
        self.rows.append(cell | dict(metrics) | {"run_id": run})

    def write(self) -> None:
        """Write the JSON file and the tables. Raises UserError where the folder cannot be written."""
        found = {
            "schema": SCHEMA,
            "source": self.source,
            "started": self.started,
            "seconds": self.seconds,
            "minutes": self.minutes,
            "environment": self.environment,
            "measurements": [each._asdict() for each in self.measurements],
            "gaps": [each._asdict() for each in self.gaps],
            TIMED_CELLS: self.rows,
        }
        write_atomic(self.out / "gpu.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
        if self.rows:
            write_table(self.out / "tables" / f"{TIMED_CELLS}.csv", "latency", self.rows)
            write_figures(self.out / "tables", self.rows)


def machine(device: torch.device) -> dict[str, Any]:
    """The environment of a record, with what a GPU's speed hangs on, and the digests of the code that is timed."""
    of_methods = {system.method: f"methods.{system.method}" for system in LABELS.values()}
    return environment.describe(str(device)) | {
        "cuda": torch.version.cuda,
        **_smi(device),
        "code": {name: code.digests(module, ("speed",)) for name, module in of_methods.items()},
    }


def _smi(device: torch.device) -> dict[str, str | None]:
    """Driver and bus, as the driver's own tool tells them; None where it does not."""
    wanted = {"driver": "driver_version", "pcie_generation": "pcie.link.gen.max", "pcie_width": "pcie.link.width.max"}
    if device.type != "cuda":
        return dict.fromkeys(wanted)
    command = ["nvidia-smi", f"--query-gpu={','.join(wanted.values())}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(wanted)
    values = [text.strip() for text in said.splitlines()[0].split(",")] if said.strip() else []
    return dict(zip(wanted, values, strict=True)) if len(values) == len(wanted) else dict.fromkeys(wanted)
