"""Speed on hardware that is not at hand, from counted FLOPs and bytes; every row it makes says `source: modelled`.

A block's kernels take the longer of arithmetic and memory traffic (`counts`), what its attention needs crosses the
link, and compute and link are walked over blocks and steps as two resources (`timeline`, `predict`). The constants are
data-sheet rates (`hardware`, conf/platform) and three efficiencies, the same everywhere, fitted once by least squares
of log(predicted / published):

    matmul 0.36     of fp16 tensor peak. Only prefill is bound by it, so it stands for all of eager PyTorch there.
    memory 0.81     of device memory rate, in decode.
    row_fetch 0.83  of the link's achieved rate, when InfiniGen fetches tokens one by one.

All 29 published latencies, speedups and throughputs (figs 14, 15, 16a, 16b, 18) are within 20 %; they are not
independent, fig 14 repeats fig 15 and fig 18 is four numbers. Root mean square error 8 %. The largest deviations:

- UVM, 17 % fast, hence the largest speedups of figs 14 and 15 15 % small. Pages are charged at the link's rate, in and
  out; the cost of serving a fault is not. Two thirds is thrashing decode; the rest is prefill, whose eager fp32 scores
  are first touches. No published number tells the two apart.
- Batch 4 of fig 15, 15 % fast for InfiniGen, 16 % for INT4, 8 % for H2O: kernel launches and Python cost about 0.6 ms
  a block (the intercept of the published latencies over the batch), and no FLOP or byte stands for them. Fig 18's
  InfiniGen block, at batch 8, is shorter than what fig 15 implies at batch 4, so no constant would fit both.
- The exposed transfer of H2O in fig 18, 12 % small, because the model lets it overlap all of the FFN.

Where the published systems are not known to follow the text: H2O and INT4 keep the first two layers full here, as in
all of the harness, while the artifact's speed code exempts none; partial_weight_ratio is the text's 0.3, its scripts
say 0.2. Beyond the published points (other machines, other lengths) nothing was checked.

    python -m harness.costmodel --calibrate
    python -m harness.costmodel --figure fig15 --platform h100-pcie5
"""
