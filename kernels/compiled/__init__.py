"""The kernels compiled for GPUs that are not here, and their resources.

compile.py compiles the launches of an op's call, shipped.py lists the calls that the kernels are
tuned for, architectures.py has the limits of each GPU.
"""
