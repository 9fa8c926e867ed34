"""Gradients through 8 bits under torch's own data parallelism: a communication hook of DDP, a reduce-scatter of FSDP2.

>>> quantize_ddp_gradients(ddp_model, reducer)       # before the first backward
>>> quantize_fsdp_gradients(fsdp_model, reducer)     # after fully_shard

Both use public interfaces of torch, and both leave the model as it is. Under FSDP2 nothing is rounded but what each
rank sends: the sum stays in full precision on the rank that keeps it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dist_lib.agoq.reducer import QuantizedReducer


class _DdpHook:
    """The hook's state: the reducer, the parameters' names, and a stream beside that of backward."""

    def __init__(self, model: DistributedDataParallel, reducer: QuantizedReducer) -> None:
        self.reducer, self.group = reducer, model.process_group
        self.names = {id(p): name for name, p in model.module.named_parameters()}
        self.stream: torch.cuda.Stream | None = None

    def reduce(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Average one bucket."""
        parameters, gradients = bucket.parameters(), bucket.gradients()
        named = {self.names[id(p)]: g for p, g in zip(parameters, gradients, strict=True)}
        self.reducer.all_reduce_named(named, group=self.group)


def ddp_hook(
    state: _DdpHook,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Average a bucket of DDP's; on a GPU beside backward, on a CPU before it goes on."""
    buffer = bucket.buffer()
    if not buffer.is_cuda:
        state.reduce(bucket)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    if state.stream is None:
        state.stream = torch.cuda.Stream(buffer.device)
    state.stream.wait_stream(torch.cuda.current_stream(buffer.device))
    done = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(state.stream):
        state.reduce(bucket)
        buffer.record_stream(state.stream)
        done.set_result(buffer)  # DDP waits for what this stream has been given so far
    return done


def quantize_ddp_gradients(model: DistributedDataParallel, reducer: QuantizedReducer) -> None:
    """Send the gradients of a DDP model through ``reducer``. Collective; call before the first backward.

    Error feedback goes by the names of the parameters, whatever buckets DDP makes of them. ``no_sync`` works as usual.

    Raises:
        AgreementError: the ranks' reducers differ.
        RuntimeError: the model has a communication hook already (from DDP).
    """
    reducer.agree(model.process_group)
    model.register_comm_hook(_DdpHook(model, reducer), ddp_hook)


class ReduceScatter:
    """What ``FSDPModule.set_custom_reduce_scatter`` takes: one for each module that is sharded by itself.

    Args:
        reducer: how gradients are reduced.
        key: under which error feedback keeps what is lost of this module's gradients.
    """

    def __init__(self, reducer: QuantizedReducer, key: str) -> None:
        self._reducer, self._key = reducer, key

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for gradients or for their sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the sum or mean of ``input_tensor`` (1-D) into ``output_tensor``.

        Raises:
            ValueError: another operation than a sum or mean.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"reduction {op} is not known here: call set_force_sum_reduction_for_comms(True) on the model before "
                "set_gradient_divide_factor, so that torch divides by itself"
            )
        average = bool(op == dist.ReduceOp.AVG)
        part = self._reducer.reduce_scatter(input_tensor, average=average, group=group, key=self._key)
        output_tensor.copy_(part)


def quantize_fsdp_gradients(model: nn.Module, reducer: QuantizedReducer) -> list[str]:
    """Send the gradients of all modules of ``model`` that ``fully_shard`` was called on through ``reducer``.

    Blocks run through all parameters of a module that is sharded by itself. On a mesh of (replicas, shards) only the
    sum over shards goes through 8 bits; that over replicas is torch's. Collective.

    Returns:
        The names of those modules; they are the keys of error feedback, whose residual has the size of the *whole*
        module on every rank.

    Raises:
        ValueError: nothing is sharded.
        AgreementError: the ranks' reducers differ.
    """
    sharded = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise ValueError("no module of this model is sharded: call torch.distributed.fsdp.fully_shard first")
    reducer.agree()
    for name, module in sharded:
        module.set_custom_reduce_scatter(ReduceScatter(reducer, name))  # type: ignore[arg-type]
    return [name for name, _ in sharded]
