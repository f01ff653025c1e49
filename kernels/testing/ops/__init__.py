"""Records of the ops, a file per family: see `kernels.testing.op`."""
