"""Triton kernels of what `methods` does step by step elsewhere; nothing imports them before a tensor lies on a GPU."""
