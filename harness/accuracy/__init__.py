"""Accuracy of a KV-cache method: tasks, perplexity, fidelity to the full cache. All of it is computed in replay."""
