"""KV-cache methods: one file each, every one a frozen dataclass of hyper-parameters (see
`methods.base`)."""
