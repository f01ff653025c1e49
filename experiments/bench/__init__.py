"""What the experiments on kernels are made of: problems and their right answers, work, times."""
