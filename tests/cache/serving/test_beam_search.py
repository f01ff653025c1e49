"""BeamSearch by itself; the searches of a model are compared with transformers in tests/models."""

from __future__ import annotations

import pytest

from cache.serving.beam_search import BeamSearch
from cache.serving.request import Request, RequestStats, ScheduledSequence
from cache.serving.sampling_params import SamplingParams

STOP = 9


@pytest.mark.parametrize(("rank_of_stop", "ends"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_hypothesis_ends_only_among_the_best_of_its_step(rank_of_stop, ends):
    request = Request(
        request_id=0,
        params=SamplingParams(beam_width=2, n=2, max_tokens=5),
        max_tokens=5,
        stop_token_ids=frozenset([STOP]),
        stats=RequestStats(arrival_time=0.0),
    )
    beam = ScheduledSequence(0, [1, 2], request, 0)
    request.sequences.append(beam)
    search = BeamSearch(request)
    tokens = [5, 6, 7]
    tokens.insert(rank_of_stop, STOP)
    search.observe(beam, [(-1.0 - rank, token) for rank, token in enumerate(tokens)])
    [(parent, successors)] = search.expand()
    assert parent is beam
    assert [token for token, _ in successors] == [5, 6]
    assert [hypothesis.token_ids for hypothesis in search.finished] == [[STOP]] * ends
