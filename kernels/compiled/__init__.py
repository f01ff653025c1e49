"""The kernels compiled for GPUs that are not here, and what the compiler made of them.

compile.py compiles what a call of an op would launch, shipped.py lists the calls that the kernels
are tuned for, architectures.py knows the limits of each GPU.
"""
