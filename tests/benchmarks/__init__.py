"""Every system drains the same rows, in turn, on the same server: ``python -m tests.benchmarks``.

No time means anything alone here: what is claimed is a ratio of two systems within one run,
where each round measures all of them one after the other. Each measurement ends with an audit of
the table and of the log that the handler kept: a row lost or handled twice fails the benchmark.
"""
