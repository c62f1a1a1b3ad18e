"""What decides how fast KV-cache offloading can be on this machine, and how near each system comes: minutes on one GPU.

    python -m benchmarks.gpu                      results in results/gpu-<device>
    python -m benchmarks.gpu --platform cpu       the same parts in seconds: tiny shapes, emulated link

Parts, the most important first; one that the time left does not suffice for is skipped, one that fails does not stop
the others, and both are said in a line.

link            rate of plain copies between pinned host memory and the device: each way, and both ways at once
steps           a decode step of every system of `harness.settings.systems` at one shape, against the best that can be
                had: max(step of ideal, bytes over the link / its rate)
gather          rate of the row gather by row size, against the link's
copies          whole pieces of a cache by copies, and the same rows by the gather, by size of piece
pin             rate at which host memory is page-locked
figures         14, 15, 16a and 18, drawn from the cells of `steps`

OUT/gpu.json holds every number with its unit, spread and conditions, and the machine; OUT/tables the cells as the
latency tables of any run, so `python -m plots --results-dir OUT` and the report read them.
Exit code: 0; 1 where a part failed; 2 for what a user can put right; 75 where parts were skipped for want of time.

Weights are random, of the shapes of OPT-13B and Llama-3-8B (`conf/model`), in fp16. They change no time but by what
infinigen selects, which with them is its cap of 20 %. A few steps of each cell are timed, and stand for all 127.

Predicted for an H200 (55 GB/s, 400 TFLOP/s in a prefill, 5 GiB/s of pinning), in seconds: start and rates 60, models
20. With the cache's C GB at a shape, seven systems on pinned memory or the device take 4.3 C / 5.4 to pin, as int4, h2o
and infinigen+int4 keep a third and less, and 12 steps of 2.7 C / 55; pageable 3 steps of C / 10; the prompt runs twice.
That is 1.7 C, and over 4 + 8 + 16 + 20 sequences of 2,048 tokens and 8 of 512 to 1,536 (all in all 101 GB) 170. 40 are
Llama's. In all about 5 minutes of the 8.
"""
