"""Serving requests: the control path of an engine, without a model and without torch.

sampling_params, request   parameters of a request, and its sequences
scheduler                  which sequences compute which tokens in a step; preemption
engine                     the loop: schedule, run, sample
beam_search, outputs       next beams; the outputs of a request
output_text                texts, streamed and whole, and stop strings
open_loop                  requests that arrive at their times, in real or modelled time
replay                     a request trace served in modelled time: ``cache.simulate_serving``
"""
