"""The other ranks of a tensor-parallel model, as child processes of the one that uses it.

All ranks run the same engine on the same requests.  Scheduling and sampling depend on nothing
else, so it is enough that each does what the first does, in the same order: add, abort, step.
"""

from __future__ import annotations

import multiprocessing
import socket
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from models.engine import Engine
from models.outputs import TokenOutput
from models.sampling_params import SamplingParams
from models.sequence import Request


class Workers:
    """Ranks 1 to size - 1.  They end by ``close``, with this object, or with this process."""

    def __init__(self, processes: list[BaseProcess], connections: list[Connection]) -> None:
        self._connections = connections
        self.close = weakref.finalize(self, _close, processes, connections)

    def tell(self, method: str, *arguments: object) -> None:
        """Have the engine of every worker call a method."""
        for connection in self._connections:
            connection.send((method, arguments))


class LeadingEngine:
    """The engine of rank 0, which has the workers do what it does."""

    def __init__(self, engine: Engine, workers: Workers) -> None:
        self._engine, self.workers = engine, workers

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        request_id = self._engine.add(prompt_token_ids, params)
        self.workers.tell("add", list(prompt_token_ids), params)
        return request_id

    def abort(self, request_id: int) -> Request:
        request = self._engine.abort(request_id)
        self.workers.tell("abort", request_id)
        return request

    def step(self) -> tuple[list[TokenOutput], list[Request]]:
        self.workers.tell("step")
        return self._engine.step()


def start_workers(size: int, device: torch.device, llm_options: Mapping[str, object]) -> Workers:
    """Start the ranks 1 to size - 1, and join them as rank 0.

    llm_options: arguments of LLM in the workers, which must be picklable.  The workers import the
    main module, so a script that starts them needs ``if __name__ == "__main__":``.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    processes, connections = [], []
    for rank in range(1, size):
        connection, theirs = context.Pipe()
        process = context.Process(
            target=_work,
            args=(rank, size, device.type, address, dict(llm_options), theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(connection)
    workers = Workers(processes, connections)
    try:
        _join(0, size, device.type, address)
    except BaseException:
        workers.close()
        raise
    return workers


def _join(rank: int, size: int, device_type: str, address: str) -> None:
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)


def _work(
    rank: int,
    size: int,
    device_type: str,
    address: str,
    llm_options: dict[str, object],
    connection: Connection,
) -> None:
    from models.llm import LLM

    _join(rank, size, device_type, address)
    engine = LLM(**llm_options).engine
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        result = getattr(engine, method)(*arguments)
        finished = result[1] if method == "step" else [result] if method == "abort" else []
        for request in finished:
            engine.completions(request)  # lets go of what it keeps


def _close(processes: list[BaseProcess], connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    if dist.is_initialized():
        dist.destroy_process_group()
