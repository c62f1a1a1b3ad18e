"""Accuracy of a KV-cache method: tasks, perplexity, long decoding, fidelity to the full cache. All
in replay."""
