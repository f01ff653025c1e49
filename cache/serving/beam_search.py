"""Beam search: the k most likely continuations, as sequences that share their prefixes' blocks.

The scheduler runs, preempts and resumes beams one by one, like other sequences.  When all beams of
a request have their next logits, they are replaced together.  A beam with several successors is
forked: they share its blocks until one writes (copy-on-write).  A beam without successors is freed
(Kwon et al., 2023, section 4.4).

The search equals ``transformers`` with ``early_stopping=False``.  A hypothesis that ends counts if
it was among the k best of its step.  Its score is sum(log p) / number of tokens ** length_penalty.
The search ends when no running beam, if it ended now, would beat the worst of the k best.
"""

import math
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from cache.serving.request import FinishReason, Request, ScheduledSequence, Status


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """The state of one request's search.

    Args:
        request: has one sequence, the first beam.
        width: number of beams.
    """

    def __init__(self, request: Request, width: int) -> None:
        self.request, self.width = request, width
        self.beams: list[ScheduledSequence] = list(request.sequences)
        self.finished: list[Hypothesis] = []
        self._candidates: dict[int, list[tuple[float, ScheduledSequence, int]]] = {}

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens needed per beam, so that ``width`` remain without stop tokens."""
        return self.width + len(self.request.stop_token_ids)

    def observe(self, seq: ScheduledSequence, candidates: list[tuple[float, int]]) -> None:
        """Record a beam's likeliest next tokens, as (log p, token)."""
        total = seq.cumulative_logprob
        found = [(total + logprob, seq, token) for logprob, token in candidates]
        self._candidates[seq.seq_id] = found

    @property
    def is_ready(self) -> bool:
        """Whether all beams are observed and hold their blocks.

        A beam can be preempted after its logits were computed.
        """
        return len(self._candidates) == len(self.beams) and all(
            beam.status is Status.RUNNING for beam in self.beams
        )

    def expand(self) -> list[tuple[ScheduledSequence, list[tuple[int, float]]]] | None:
        """Choose the successors of each beam: (token, cumulative log-probability), likeliest first.

        None if the search is over.  All beams must be observed.  Appends and frees nothing; the
        caller sets ``beams``.
        """
        ranked = [each for beam in self.beams for each in self._candidates[beam.seq_id]]
        ranked.sort(key=itemgetter(0), reverse=True)
        self._candidates.clear()
        num_tokens = self.beams[0].num_output_tokens + 1
        is_last = num_tokens == self.request.max_tokens
        chosen: list[tuple[float, ScheduledSequence, int]] = []
        for rank, (total, beam, token) in enumerate(ranked):
            stops = token in self.request.stop_token_ids
            if rank < self.width and (stops or is_last):
                reason = FinishReason.STOP if stops else FinishReason.LENGTH
                ended = self._hypothesis([*beam.output_token_ids, token], total, reason)
                self.finished = _ranked([*self.finished, ended])[: self.width]
            if not stops and len(chosen) < self.width:
                chosen.append((total, beam, token))
        if is_last or not chosen or self._cannot_improve(chosen[0][0], num_tokens):
            return None
        return [
            (beam, [(token, total) for total, parent, token in chosen if parent is beam])
            for beam in self.beams
        ]

    def best(self) -> list[Hypothesis]:
        """The n best hypotheses, the best first, with beams that were cancelled or failed."""
        cancelled = [
            self._hypothesis(beam.output_token_ids, beam.cumulative_logprob, beam.finish_reason)
            for beam in self.beams
            if beam.finish_reason is FinishReason.ERROR
            or (beam.finish_reason is FinishReason.ABORT and beam.num_output_tokens)
        ]
        return _ranked(self.finished + cancelled)[: self.request.params.n]

    def _hypothesis(self, token_ids: list[int], total: float, reason: FinishReason) -> Hypothesis:
        return Hypothesis(token_ids, total, self._score(total, len(token_ids)), reason)

    def _cannot_improve(self, best_total: float, num_tokens: int) -> bool:
        return (
            len(self.finished) == self.width
            and self._score(best_total, num_tokens) <= self.finished[-1].score
        )

    def _score(self, total: float, num_tokens: int) -> float:
        penalty, length = self.request.params.length_penalty, max(1, num_tokens)
        if abs(penalty) * math.log(length) < 700:
            return total / length**penalty
        return total * math.exp(math.copysign(700, -penalty))  # within the range of floats


def _ranked(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=attrgetter("score"), reverse=True)
