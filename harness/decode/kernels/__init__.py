"""Triton kernels. Imported only where they are launched: under CUDA, and in tests."""
