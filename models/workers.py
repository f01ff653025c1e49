"""The other ranks of a tensor-parallel model, as child processes of the one that uses it.

All ranks run the same engine on the same requests.  Scheduling and sampling depend on nothing
else, so it is enough that each does what the first does, in the same order.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from cache.serving.engine import Engine
from cache.serving.outputs import TokenOutput
from cache.serving.request import Request
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler

_HOST = "127.0.0.1"


class Workers:
    """Ranks 1 to size - 1.  They end by ``close``, with this object, or with this process.

    is_led: whether rank 0 has got its engine as well.
    """

    def __init__(self, processes: list[BaseProcess], connections: list[Connection]) -> None:
        self._processes, self._connections = processes, connections
        self.is_led = False
        self.close = weakref.finalize(self, _close, processes, connections)
        _started.add(self)

    def wait_until_ready(self) -> None:
        """Raises RuntimeError if a worker ends before it is ready to join."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.recv()
            except EOFError:
                raise RuntimeError(
                    f"tensor-parallel rank {rank} ended as it started.  Is this a script without "
                    '`if __name__ == "__main__":`?  The ranks import it.'
                ) from None

    def tell(self, method: str, *arguments: object) -> None:
        """Have the engine of every worker call a method.  RuntimeError if one has ended."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.send((method, arguments))
            except OSError:
                raise RuntimeError(
                    f"tensor-parallel rank {rank} has ended, on its own or since a step failed: "
                    "make a new LLM"
                ) from None

    def kill(self) -> None:
        """Close without waiting for what they compute."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        self.close()


_started: weakref.WeakSet[Workers] = weakref.WeakSet()


def has_workers() -> bool:
    """Whether workers of this process are running, which it then leads as rank 0."""
    return any(workers.close.alive for workers in _started)


class LeadingEngine:
    """The engine of rank 0, which has the workers do what it does."""

    def __init__(self, engine: Engine, workers: Workers) -> None:
        self._engine, self.workers = engine, workers
        workers.is_led = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, *keys: object) -> int:
        self._engine.check(prompt_token_ids, params)
        self.workers.tell("add", list(prompt_token_ids), params, *keys)
        return self._engine.add(prompt_token_ids, params, *keys)

    def reset_prefix_cache(self) -> bool:
        done = self._engine.reset_prefix_cache()
        if done:
            self.workers.tell("reset_prefix_cache")
        return done

    def abort(self, request_id: int) -> Request:
        request = self._engine.abort(request_id)
        self.workers.tell("abort", request_id)
        return request

    def step(self) -> tuple[list[TokenOutput], list[Request]]:
        self.workers.tell("step")
        return self._engine.step()

    def restart(self, scheduler: Scheduler) -> list[Request]:
        """As Engine.restart; but the ranks have lost each other, and this engine serves no more."""
        self.workers.kill()
        return self._engine.restart(scheduler)


def start_workers(size: int, device: torch.device, llm_options: Mapping[str, object]) -> Workers:
    """Start the ranks 1 to size - 1, and join them as rank 0.

    llm_options: arguments of LLM in the workers, which must be picklable.  The workers import the
    main module, so a script that starts them needs ``if __name__ == "__main__":``.

    Raises ValueError if this process has workers already or a rank would have no GPU, RuntimeError
    if a worker does not start.
    """
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size={size}: needs a GPU for each rank; there are "
            f"{torch.cuda.device_count()}"
        )
    for others in _started:
        if others.close.alive and others.is_led:
            raise ValueError(
                f"tensor_parallel_size={size}: this process leads the ranks of another LLM; drop "
                "that one first"
            )
        others.kill()  # a traceback may keep those of an LLM that failed to begin
    context = multiprocessing.get_context("spawn")
    store = _loopback_store(size)
    processes, connections = [], []
    workers = Workers(processes, connections)
    try:
        for rank in range(1, size):
            connection, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(rank, size, device.type, store.port, dict(llm_options), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(connection)
        workers.wait_until_ready()
        if device.type == "cuda":
            torch.cuda.set_device(0)
        _join(0, size, device.type, store)
    except BaseException:
        workers.kill()
        raise
    return workers


def _loopback_store(size: int) -> dist.TCPStore:
    """A store that only this machine reaches; one that opens its port itself listens everywhere."""
    listener = socket.create_server((_HOST, 0))
    return dist.TCPStore(
        _HOST,
        listener.getsockname()[1],
        size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _join(rank: int, size: int, device_type: str, store: dist.Store) -> None:
    backend = "nccl" if device_type == "cuda" else "gloo"
    asked = "GLOO_SOCKET_IFNAME" in os.environ
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens where the host name leads
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    finally:
        if not asked:
            del os.environ["GLOO_SOCKET_IFNAME"]


def _work(
    rank: int,
    size: int,
    device_type: str,
    port: int,
    llm_options: dict[str, object],
    connection: Connection,
) -> None:
    from models.llm import LLM

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0 to answer
    if device_type == "cuda":
        torch.cuda.set_device(rank)  # rank 0 would wait for ever for one that fails here later
    connection.send("ready")
    _join(rank, size, device_type, dist.TCPStore(_HOST, port, size, is_master=False))
    try:
        _serve(LLM(**llm_options).engine, connection)
    finally:
        dist.destroy_process_group()


def _serve(engine: Engine, connection: Connection) -> None:
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
    try:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
