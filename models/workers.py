"""Ranks 1 and up of a tensor-parallel model, as child processes of rank 0.

Rank 0 sends every call of its engine to the workers, and their engines repeat the calls in the same
order.  This suffices because scheduling and sampling depend only on the requests.
"""

import multiprocessing
import os
import signal
import tempfile
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cache.blocks.session_hint import SessionHint
from cache.serving.engine import Engine
from cache.serving.outputs import TokenOutput
from cache.serving.request import Request
from cache.serving.sampling_params import SamplingParams
from cache.serving.scheduler import Scheduler


class Workers:
    """Ranks 1 to size - 1.  They end with ``close``, or when this object or this process ends.

    is_led: whether rank 0 has made its LeadingEngine.
    """

    def __init__(
        self, processes: list[BaseProcess], connections: list[Connection], store: Path
    ) -> None:
        self._processes, self._connections = processes, connections
        self.is_led = False
        self.close = weakref.finalize(self, _close, processes, connections, store)
        _started.add(self)

    def call(self, method: str, *arguments: object, **options: object) -> None:
        """Call a method of every worker's engine.  Raises RuntimeError if a worker has ended."""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.send((method, arguments, options))
            except OSError:
                raise RuntimeError(
                    f"tensor-parallel rank {rank} has ended, on its own or since a step failed: "
                    "make a new LLM"
                ) from None

    def kill(self) -> None:
        """Close without waiting for running steps."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        self.close()


_started: weakref.WeakSet[Workers] = weakref.WeakSet()


def has_workers() -> bool:
    """Whether this process leads running workers as rank 0."""
    return any(workers.close.alive for workers in _started)


class LeadingEngine:
    """The engine of rank 0.  It also makes each call on the engines of the workers."""

    def __init__(self, engine: Engine, workers: Workers) -> None:
        self._engine, self.workers = engine, workers
        workers.is_led = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *,
        stream_text: bool = False, **keys: Any,
    ) -> int:  # fmt: skip
        prompt_token_ids = self._engine.check(prompt_token_ids, params, **keys)
        request_id = self._engine.add(prompt_token_ids, params, stream_text=stream_text, **keys)
        try:
            self.workers.call("add", prompt_token_ids, params, **keys)
        except BaseException:
            self._engine.abort(request_id)
            raise
        return request_id

    def reset_prefix_cache(self) -> bool:
        done = self._engine.reset_prefix_cache()
        if done:
            self.workers.call("reset_prefix_cache")
        return done

    def hint_session(self, hint: SessionHint) -> None:
        self._engine.hint_session(hint)
        self.workers.call("hint_session", hint)

    def abort(self, request_id: int) -> Request:
        request = self._engine.abort(request_id)
        self.workers.call("abort", request_id)
        return request

    def step(self) -> tuple[list[TokenOutput], list[Request]]:
        self.workers.call("step")
        tokens, finished = self._engine.step()
        failed = [request.request_id for request in finished if request.error]
        if failed:
            self.workers.call("fail", failed)
        return tokens, finished

    def restart(self, scheduler: Scheduler) -> list[Request]:
        """End the workers, whose state may now differ.  Restart the engine; later steps raise."""
        self.workers.kill()
        return self._engine.restart(scheduler)


def start_workers(size: int, device: torch.device, make_engine: Callable[[], Engine]) -> Workers:
    """Start ranks 1 to size - 1 and join them as rank 0.

    make_engine: picklable function that each worker calls to make its engine.  The workers import
    the main module, so a script needs ``if __name__ == "__main__":``.

    Raises ValueError if this process leads other workers or there are fewer GPUs than ranks.
    Raises RuntimeError if a worker does not start."""
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size={size}: needs a GPU for each rank; there are "
            f"{torch.cuda.device_count()}"
        )
    for workers in _started:
        if workers.close.alive and workers.is_led:
            raise ValueError(
                f"tensor_parallel_size={size}: this process leads the ranks of another LLM; drop "
                "that one first"
            )
        workers.kill()  # of an LLM that failed to start; a traceback may keep the object alive
    context = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile(prefix="pagelab-ranks-", delete=False) as file:
        store = Path(file.name)  # a file, because a TCP store would listen on all addresses
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    workers = Workers(processes, connections, store)
    try:
        for rank in range(1, size):
            connection, of_worker = context.Pipe()
            arguments = rank, size, device.type, store, make_engine, of_worker
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            of_worker.close()
            processes.append(process)
            connections.append(connection)
        for rank, connection in enumerate(connections, start=1):
            try:
                connection.recv()  # "ready"
            except EOFError:
                raise RuntimeError(
                    f"tensor-parallel rank {rank} ended as it started.  Is this a script without "
                    '`if __name__ == "__main__":`?  The ranks import it.'
                ) from None
        if device.type == "cuda":
            torch.cuda.set_device(0)
        _join(0, size, device.type, store)
    except BaseException:
        workers.kill()
        raise
    return workers


def _join(rank: int, size: int, device_type: str, store: Path) -> None:
    backend = "nccl" if device_type == "cuda" else "gloo"
    is_set = "GLOO_SOCKET_IFNAME" in os.environ
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo uses the address of the host name
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    finally:
        if not is_set:
            del os.environ["GLOO_SOCKET_IFNAME"]


def _work(
    rank: int, size: int, device_type: str, store: Path,
    make_engine: Callable[[], Engine], connection: Connection,
) -> None:  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    if device_type == "cuda":
        torch.cuda.set_device(rank)  # if this fails, rank 0 is not yet waiting for this rank
    connection.send("ready")
    _join(rank, size, device_type, store)
    try:
        _serve(make_engine(), connection)
    finally:
        dist.destroy_process_group()


def _serve(engine: Engine, connection: Connection) -> None:
    failed: set[int] = set()
    while True:
        try:
            method, arguments, options = connection.recv()
        except EOFError:
            return
        finished: list[Request] = []
        if method == "fail":  # requests that failed on rank 0; here they may not have failed
            failed -= set(*arguments)
            finished = [engine.abort(one) for one in arguments[0] if one in engine.requests]
        elif failed:
            raise RuntimeError(f"requests {sorted(failed)} failed on this rank alone")
        elif method == "step":
            _, finished = engine.step()
            failed |= {request.request_id for request in finished if request.error}
        else:
            result = getattr(engine, method)(*arguments, **options)
            finished = [result] if method == "abort" else []
        for request in finished:
            engine.completions(request)  # this call frees the request's texts


def _close(processes: list[BaseProcess], connections: list[Connection], store: Path) -> None:
    try:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    finally:
        store.unlink(missing_ok=True)
        if dist.is_initialized():
            dist.destroy_process_group()
