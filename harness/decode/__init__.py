"""The KV cache's two memories: row codecs, slot stores, the link between them, gathers by index."""
