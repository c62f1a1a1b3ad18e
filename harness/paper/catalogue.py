"""The paper's figures and tables: what each shows, which tables hold its numbers, and the command that makes them.

`name` is that of `results/figures/<name>.png` and of its table. What the cost model predicts is an entry of its own,
since predictions and measurements share no figure.
"""

from typing import NamedTuple

MODELLED = "-modelled"
"""The end of the name of what the cost model predicts."""


class Entry(NamedTuple):
    """A figure or table. tables: of `results/tables`, the one with its own numbers first."""

    name: str
    title: str
    command: str
    tables: tuple[str, ...]


def _of_latency(name: str, title: str) -> tuple[Entry, Entry]:
    """The same drawing of what was timed and of what is modelled."""
    return (
        Entry(name, title, "make speedup", (name,)),
        Entry(f"{name}{MODELLED}", f"{title}, modelled", "make modelled", (f"{name}{MODELLED}",)),
    )


def _of_run(name: str, title: str) -> Entry:
    return Entry(name, title, f"python run.py experiment={name} && make plots", (name,))


def _of_grid(name: str, title: str, *settings: str, tables: tuple[str, ...] = ()) -> Entry:
    """What has a grid of its own; `tables`, where it has several."""
    return Entry(name, title, " ".join(["python run.py", f"grid={name}", *settings]), tables or (name,))


ENTRIES = (
    _of_run("fig2", "Bytes of KV cache and weights"),
    _of_run("fig4", "Similarity of attention weights to the full cache's, by token"),
    _of_run("fig5", "Key tokens needed for 0.9 of the attention weight"),
    _of_run("table1", "Similarity of a layer's input to what came before it"),
    _of_run("fig7", "Column magnitudes of queries and keys before and after skewing"),
    Entry("fig11", "Accuracy against the share of the cache that is read", "make accuracy", ("fig11", "perplexity")),
    Entry("perplexity", "Perplexity and fidelity to the full cache", "make accuracy", ("perplexity",)),
    Entry("fig12", "Perplexity by position in the text", "make accuracy", ("fig12",)),
    Entry("fig13", "With and without skewing", "make accuracy", ("fig13", "fig11")),
    _of_grid("table2", "Perplexity with a pool of limited size, by eviction policy", "grid.data_root=DIR"),
    *_of_latency("fig14", "Seconds of prefill and decode"),
    *_of_latency("fig15", "Seconds of prefill and decode against the batch size"),
    *_of_latency("fig16a", "Speedup over offload against the length"),
    *_of_latency("fig16b", "Speedup over offload by model"),
    _of_grid(
        "fig17",
        "Accuracy and latency against alpha and the partial weight ratio",
        tables=("fig17", "fig17-latency"),
    ),
    *_of_latency("fig18", "Milliseconds of one block by segment"),
    Entry("latency", "Every timed cell", "make speedup", ("latency",)),
    _of_grid("fig19", "Perplexity against the share read, and against the length", "grid.data_root=DIR"),
    _of_run("fig20", "Attention over long sequences"),
    _of_grid("choices", "InfiniGen's column rule, exempt layers and eviction"),
)
