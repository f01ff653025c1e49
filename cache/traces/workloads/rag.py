"""Retrieval-augmented generation: the order of documents differs from request to request."""

from functools import partial

from cache.traces.workloads.draws import Zipf, generator, log_normal_tokens, poisson_arrivals_ms
from cache.traces.workloads.options import Count, NonNegative, Positive, Requests, Seed, workload
from cache.traces.workloads.prompts import PromptSpace


@workload
def rag(
    *,
    num_requests: Count = 2500,
    block_size: Count = 16,
    seed: Seed = 0,
    request_rate: Positive = 5.0,
    num_documents: Count = 2000,
    zipf_exponent: NonNegative = 1.0,
    documents_per_request: Count = 4,
    system_tokens: Count = 200,
    document_tokens: Positive = 250.0,
    question_tokens: Positive = 30.0,
    output_tokens: Positive = 150.0,
    length_sigma: NonNegative = 0.8,
) -> Requests:
    """Questions over retrieved documents: system prompt, documents in random order, question.

    A document's blocks can hit only behind the same documents in the same order.  So only the
    system prompt and a popular first document hit; most popular documents miss.

    Args:
        request_rate: Rate of Poisson arrivals, requests per second.
        num_documents: Number of documents; ``zipf_exponent``: skew of their popularity.
        documents_per_request: Number of different documents per request, sampled by popularity.
        system_tokens: Length of the system prompt, which all requests share.
        document_tokens: Median length of a document.  Its length is the same in all requests.
        question_tokens: Median length of a question.
        output_tokens: Median length of an answer.
        length_sigma: Standard deviation of the logarithm of every length (log-normal), except the
            system prompt's.
    """
    if documents_per_request > num_documents:
        raise ValueError(
            f"documents_per_request must not exceed num_documents, got {documents_per_request} "
            f"and {num_documents}"
        )
    rng = generator(seed)
    tokens = partial(log_normal_tokens, rng, sigma=length_sigma)
    space = PromptSpace(block_size)
    popularity = Zipf(num_documents, zipf_exponent)
    system_prompt = space.extended(space.empty, system_tokens)
    documents = [(tokens(document_tokens), space.new_text()) for _ in range(num_documents)]
    for arrival in poisson_arrivals_ms(rng, request_rate):
        prompt = system_prompt
        for document in popularity.draw_distinct(rng, documents_per_request):
            prompt = space.extended(prompt, *documents[document])
        yield arrival, space.extended(prompt, tokens(question_tokens)), tokens(output_tokens)
