"""Which operations a piece of work runs, and which of them have no deterministic implementation on CUDA.

Operations are recorded through PyTorch's dispatcher on the CPU, forward and backward, so no GPU is needed. The table
says what PyTorch does with each on CUDA; the word of a real run on CUDA beats it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.utils._python_dispatch import TorchDispatchMode

CHECKED_WITH = "2.14.1"
"""The PyTorch version whose list of operations (torch.use_deterministic_algorithms) the table was made from."""

ALERTING: dict[str, str] = {
    "_adaptive_avg_pool2d_backward": "AdaptiveAvgPool2d",
    "_adaptive_avg_pool3d_backward": "AdaptiveAvgPool3d",
    "adaptive_max_pool2d_backward": "AdaptiveMaxPool2d",
    "avg_pool3d_backward": "AvgPool3d",
    "fractional_max_pool2d_backward": "FractionalMaxPool2d",
    "fractional_max_pool3d_backward": "FractionalMaxPool3d",
    "max_unpool2d": "MaxUnpool2d",
    "max_unpool3d": "MaxUnpool3d",
    "upsample_linear1d_backward": "linear interpolation",
    "upsample_bilinear2d_backward": "bilinear interpolation",
    "upsample_bicubic2d_backward": "bicubic interpolation",
    "upsample_trilinear3d_backward": "trilinear interpolation",
    "reflection_pad1d_backward": "ReflectionPad1d",
    "reflection_pad2d_backward": "ReflectionPad2d",
    "reflection_pad3d_backward": "ReflectionPad3d",
    "nll_loss2d_forward": "NLLLoss on maps",
    "_ctc_loss_backward": "CTCLoss",
    "put": "Tensor.put",
    "put_": "Tensor.put_",
    "histc": "torch.histc",
    "bincount": "torch.bincount",
    "median": "torch.median",
    "grid_sampler_2d_backward": "grid_sample",
    "grid_sampler_3d_backward": "grid_sample",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention_backward": "scaled_dot_product_attention",
}
"""Operation as the dispatcher calls it → what users know it as."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations_of(work: Callable[[], object]) -> set[str]:
    """Names of the operations that a function runs, in its forward and backward passes."""
    with _Recorder() as recorder:
        work()
    return recorder.operations


def alerting_operations(work: Callable[[], object]) -> list[str]:
    """Operations of a function that alert on CUDA by the table, as users know them, sorted."""
    return sorted({ALERTING[name] for name in operations_of(work) if name in ALERTING})
