"""Accuracy of a KV-cache method: tasks, perplexity, fidelity to the full cache. Everything here is computed in replay."""
