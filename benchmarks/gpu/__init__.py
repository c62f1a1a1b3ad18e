"""What decides how fast KV-cache offloading can be on this machine, and how near each system comes: minutes on one GPU.

    python -m benchmarks.gpu                      results in results/gpu-<device>
    python -m benchmarks.gpu --platform cpu       the same parts in seconds: tiny shapes, emulated link

Parts, the most important first; one that the time left does not suffice for is skipped, one that fails does not stop
the others, and both are said in a line.

link            rate of plain copies between pinned host memory and the device: each way, and both ways at once
steps           a decode step of every system whose transfers are counted (`harness.settings.systems`), shape by shape,
                against the best that can be had: max(step of ideal, bytes over the link / its rate)
gather          rate of the row gather by row size, against the link's
copies          whole pieces of a cache by copies, and the same rows by the gather, by size of piece
pin             rate at which host memory is page-locked
figures         14, 15, 16a and 18, drawn from the cells of `steps`

OUT/gpu.json holds every number with its unit, spread and conditions, and the machine; OUT/tables the cells as the
latency tables of any run, so `python -m plots --results-dir OUT` and the report read them.
Exit code: 0; 1 where a part failed; 2 for what a user can put right; 75 where parts were skipped for want of time.

Weights are random, of the shapes of OPT-13B and Llama-3-8B (`conf/model`), in fp16. They change no time but by what
infinigen selects, which with them is its cap of 20 %. Ten steps of a cell are timed, two of pageable memory, and stand
for all 127. A shape's prompt runs once for all its cells, as on the CPU, where its queries, keys and values can stay
on the device beside the cache (44 GiB at batch 20); else each cell runs it. A prefill holds the page-locking of its
cache.

How long it takes is worked out in `benchmarks/NOTES.md`: some 6 minutes on an H200, predicted.
"""
