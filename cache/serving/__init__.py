"""Serving requests: the control path of an engine, without a model and without torch.

sampling_params, request   what is asked for, and the sequences that come of it
scheduler                  which sequences compute which tokens in a step, and who has to yield
engine                     the loop: schedule, run, sample; the runner and the sampler are given
beam_search, outputs       next beams; what a request returns
open_loop                  requests that arrive at their times, in real or modelled time
replay                     a request trace served in modelled time: ``cache.simulate_serving``
"""
