"""Register the kernels as PyTorch operators, `torch.ops.pagelab.*`, for torch.compile and
torch.export.

A decorator on a launcher registers an operator of the same name, with a schema from its annotations
and a fake implementation (results without data). While torch.compile or torch.export traces, the
decorated function calls the operator. Otherwise it calls the launcher directly, so eager calls
avoid the dispatcher.

The scale of an fp8 cache may be a number or a tensor. A schema has no such type, so operators
accept only tensors as scales, and a traced call converts numbers to tensors.

The operators are for inference: they have no derivative. Under a bare FakeTensorMode or make_fx,
without a compiler, call `torch.ops.pagelab.*` directly.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import chain

import torch

from kernels.fp8_cache import Scale
from kernels.launch import remembered

_library = torch.library.Library("pagelab", "DEF")


def _on_its_gpu(launcher: Callable, remembers: bool) -> Callable:
    """Make the tensors' GPU current, because Triton launches on the current device.

    remembers: whether calls are remembered. Calls on CPU tensors never are.
    """
    on_gpu = remembered(launcher) if remembers else launcher

    @functools.wraps(launcher)
    def launch_there(*args, **kwargs):
        for arg in chain(args, kwargs.values()):
            if not getattr(arg, "is_cpu", True):  # the first tensor that is not in host memory
                if arg.is_cuda and (gpu := arg.get_device()) != torch.cuda.current_device():
                    with torch.cuda.device(gpu):
                        return on_gpu(*args, **kwargs)
                return on_gpu(*args, **kwargs)
        return launcher(*args, **kwargs)

    return launch_there


def _operator(
    function: Callable, signature: inspect.Signature, fake: Callable, mutates_args: tuple[str, ...]
) -> Callable:
    """Register a function with this signature. Return a wrapper that also allows number scales.

    `torch.library.custom_op` has no keyword-only tensors. It takes 8 us per call, this 1 us.
    """
    name = function.__name__.lstrip("_")
    scales = [p.name for p in signature.parameters.values() if p.annotation == Scale]
    parameters = [
        p.replace(annotation=torch.Tensor | None) if p.name in scales else p
        for p in signature.parameters.values()
    ]

    def prototype(): ...

    prototype.__dict__["__signature__"] = signature.replace(parameters=parameters)
    schema = torch.library.infer_schema(prototype, mutates_args=mutates_args)
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pagelab::{name}", fake, lib=_library)
    operator = getattr(torch.ops.pagelab, name).default

    def call(*args, **kwargs):
        for scale in scales:
            if isinstance(kwargs.get(scale), (int, float)):
                tensors = chain(args, kwargs.values())
                device = next(arg.device for arg in tensors if isinstance(arg, torch.Tensor))
                kwargs[scale] = torch.full((), kwargs[scale], dtype=torch.float32, device=device)
        return operator(*args, **kwargs)

    return call


def _traced_or_eager(launch: Callable, traced: Callable) -> Callable:
    """Return the public function: it calls `traced` while PyTorch traces, else `launch`."""

    @functools.wraps(launch)
    def op(*args, **kwargs):
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        return launch(*args, **kwargs)

    return op


def like_first(first: torch.Tensor, *_args: object, **_options: object) -> torch.Tensor:
    """Fake implementation of an op whose result has the shape and dtype of the first argument."""
    return first.new_empty(first.shape)


def functional_op(
    fake: Callable = lambda *_args, **_kwargs: None,
    mutates_args: tuple[str, ...] = (),
    remembers: bool = True,
) -> Callable[[Callable], Callable]:
    """Register a launcher. fake: makes results without data (by default None) from its arguments.
    mutates_args: arguments that it writes to. remembers: see `kernels.launch`."""

    def register(launcher: Callable) -> Callable:
        launch = _on_its_gpu(launcher, remembers)
        signature = inspect.signature(launcher, eval_str=True)
        return _traced_or_eager(launch, _operator(launch, signature, fake, mutates_args))

    return register


def attention_op(launcher: Callable) -> Callable:
    """Register an attention launcher: q first, `out` and `return_lse` keyword-only. The output is
    shaped like q, but its rows have head_dim_v elements if the launcher has that option.

    An operator may not return an argument, so the operator mutates a required `out`. It returns the
    LSE, shaped like q without head_dim, or an empty tensor without return_lse.
    """
    launch = _on_its_gpu(launcher, remembers=True)
    parameters = dict(inspect.signature(launcher, eval_str=True).parameters)
    out, head_dim_v = parameters["out"], parameters.get("head_dim_v")
    default_dim = head_dim_v.default if head_dim_v else None
    parameters["out"] = out.replace(annotation=torch.Tensor, default=out.empty)
    signature = inspect.Signature([*parameters.values()], return_annotation=torch.Tensor)

    @functools.wraps(launcher)
    def lse_of(q, *args, out, return_lse=False, **kwargs):
        result = launch(q, *args, out=out, return_lse=return_lse, **kwargs)
        return result[1] if return_lse else q.new_empty(0, dtype=torch.float32)

    def fake(q, *_args, out, return_lse=False, **_kwargs):
        return q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=torch.float32)

    op = _operator(lse_of, signature, fake, mutates_args=("out",))

    def traced(q, *args, out=None, return_lse=False, **kwargs):
        if out is None:
            head_dim = kwargs.get("head_dim_v", default_dim) or q.shape[-1]
            out = q.new_empty(*q.shape[:-1], head_dim)
        lse = op(q, *args, out=out, return_lse=return_lse, **kwargs)
        return (out, lse) if return_lse else out

    return _traced_or_eager(launch, traced)
