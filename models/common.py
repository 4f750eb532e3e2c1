"""Building blocks of YOLOv5's model files, then the attention blocks SE, ECA, CBAM, BAM, scSE, CA and SimAM.

Signatures are short and positional because a line of a model file is: `c1` and `c2` are channels in and out,
`k` kernel, `s` stride, `p` padding, `g` groups, `d` dilation, `n` repeats, `e` the share of `c2` that is the hidden
width. Parameter names are YOLOv5's, so that its weights fit one to one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS_LAST = torch.channels_last


def same_padding(k: int, p: int | None = None, d: int = 1) -> int:
    """Padding that keeps the size of a map at stride 1, unless `p` is given."""
    return (d * (k - 1)) // 2 if p is None else p


class Conv(nn.Module):
    """Convolution, batch norm, activation (SiLU unless `act` is False or another module)."""

    def __init__(self, c1, c2, k=1, s=1, p=None, g=1, d=1, act=True):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, same_padding(k, p, d), groups=g, dilation=d, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = act if isinstance(act, nn.Module) else nn.SiLU() if act else nn.Identity()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

    def fuse(self) -> None:
        """Fold the batch norm's running statistics into the convolution: equal outputs in evaluation mode."""
        if isinstance(self.bn, nn.Identity):
            return
        conv, bn = self.conv, self.bn
        with torch.no_grad():
            scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
            bias = conv.bias if conv.bias is not None else torch.zeros_like(bn.running_mean)
            conv.weight.mul_(scale.view(-1, 1, 1, 1))
            conv.bias = nn.Parameter(bn.bias + (bias - bn.running_mean) * scale, requires_grad=False)
        conv.weight.requires_grad_(False)
        self.bn = nn.Identity()


class DWConv(Conv):
    """Depthwise convolution block: as many groups as divide both widths."""

    def __init__(self, c1, c2, k=1, s=1, d=1, act=True):
        super().__init__(c1, c2, k, s, g=math.gcd(c1, c2), d=d, act=act)


class DWConvTranspose2d(nn.ConvTranspose2d):
    """Depthwise transposed convolution."""

    def __init__(self, c1, c2, k=1, s=1, p1=0, p2=0):
        super().__init__(c1, c2, k, s, p1, p2, groups=math.gcd(c1, c2))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution with a shortcut where the widths allow it."""

    def __init__(self, c1, c2, shortcut=True, g=1, e=0.5):
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden, 1, 1)
        self.cv2 = Conv(hidden, c2, 3, 1, g=g)
        self.add = shortcut and c1 == c2

    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class BottleneckCSP(nn.Module):
    """Cross-stage partial bottleneck (arXiv:1911.11929)."""

    def __init__(self, c1, c2, n=1, shortcut=True, g=1, e=0.5):
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden, 1, 1)
        self.cv2 = nn.Conv2d(c1, hidden, 1, 1, bias=False)
        self.cv3 = nn.Conv2d(hidden, hidden, 1, 1, bias=False)
        self.cv4 = Conv(2 * hidden, c2, 1, 1)
        self.bn = nn.BatchNorm2d(2 * hidden)
        self.act = nn.SiLU()
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, g, e=1.0) for _ in range(n)))

    def forward(self, x):
        main = self.cv3(self.m(self.cv1(x)))
        return self.cv4(self.act(self.bn(torch.cat((main, self.cv2(x)), 1))))


class C3(nn.Module):
    """Cross-stage partial bottleneck with three convolutions."""

    def __init__(self, c1, c2, n=1, shortcut=True, g=1, e=0.5):
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden, 1, 1)
        self.cv2 = Conv(c1, hidden, 1, 1)
        self.cv3 = Conv(2 * hidden, c2, 1)
        self.m = self.body(hidden, n, shortcut, g)

    @staticmethod
    def body(hidden, n, shortcut, g) -> nn.Module:
        """The part between `cv1` and `cv3`, which the variants replace."""
        return nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, g, e=1.0) for _ in range(n)))

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class CrossConv(nn.Module):
    """A 1xk and a kx1 convolution with a shortcut."""

    def __init__(self, c1, c2, k=3, s=1, g=1, e=1.0, shortcut=False):
        super().__init__()
        hidden = int(c2 * e)
        self.cv1 = Conv(c1, hidden, (1, k), (1, s), p=(0, k // 2))
        self.cv2 = Conv(hidden, c2, (k, 1), (s, 1), p=(k // 2, 0), g=g)
        self.add = shortcut and c1 == c2

    def forward(self, x):
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y


class C3x(C3):
    """C3 of cross convolutions."""

    @staticmethod
    def body(hidden, n, shortcut, g):
        return nn.Sequential(*(CrossConv(hidden, hidden, 3, 1, g, 1.0, shortcut) for _ in range(n)))


class TransformerLayer(nn.Module):
    """Self-attention and a two-layer perceptron on tokens `[L, B, C]`, without layer norm (arXiv:2010.11929)."""

    def __init__(self, c, num_heads):
        super().__init__()
        self.q = nn.Linear(c, c, bias=False)
        self.k = nn.Linear(c, c, bias=False)
        self.v = nn.Linear(c, c, bias=False)
        self.ma = nn.MultiheadAttention(embed_dim=c, num_heads=num_heads)
        self.fc1 = nn.Linear(c, c, bias=False)
        self.fc2 = nn.Linear(c, c, bias=False)

    def forward(self, x):
        # with weights asked for, the explicit softmax path runs, whose gradient is deterministic on CUDA
        x = x + self.ma(self.q(x), self.k(x), self.v(x), need_weights=True)[0]
        return x + self.fc2(self.fc1(x))


class TransformerBlock(nn.Module):
    """Transformer layers over the positions of a map, with a learned linear position term."""

    def __init__(self, c1, c2, num_heads, num_layers):
        super().__init__()
        self.conv = Conv(c1, c2) if c1 != c2 else None
        self.linear = nn.Linear(c2, c2)
        self.tr = nn.Sequential(*(TransformerLayer(c2, num_heads) for _ in range(num_layers)))

    def forward(self, x):
        if self.conv is not None:
            x = self.conv(x)
        tokens = x.flatten(2).permute(2, 0, 1)
        return self.tr(tokens + self.linear(tokens)).permute(1, 2, 0).reshape(x.shape)


class C3TR(C3):
    """C3 around a transformer."""

    @staticmethod
    def body(hidden, n, shortcut, g):
        return TransformerBlock(hidden, hidden, 4, n)


class SPP(nn.Module):
    """Spatial pyramid pooling (arXiv:1406.4729): maxima over several windows, side by side."""

    def __init__(self, c1, c2, k=(5, 9, 13)):
        super().__init__()
        hidden = c1 // 2
        self.cv1 = Conv(c1, hidden, 1, 1)
        self.cv2 = Conv(hidden * (len(k) + 1), c2, 1, 1)
        self.m = nn.ModuleList(nn.MaxPool2d(kernel_size=size, stride=1, padding=size // 2) for size in k)

    def forward(self, x):
        x = self.cv1(x)
        return self.cv2(torch.cat([x, *(pool(x) for pool in self.m)], 1))


class SPPF(nn.Module):
    """Spatial pyramid pooling by repeating one small window: equals `SPP` with k, 2k-1, 3k-2."""

    def __init__(self, c1, c2, k=5):
        super().__init__()
        hidden = c1 // 2
        self.cv1 = Conv(c1, hidden, 1, 1)
        self.cv2 = Conv(hidden * 4, c2, 1, 1)
        self.m = nn.MaxPool2d(kernel_size=k, stride=1, padding=k // 2)

    def forward(self, x):
        maps = [self.cv1(x)]
        for _ in range(3):
            maps.append(self.m(maps[-1]))
        return self.cv2(torch.cat(maps, 1))


class C3SPP(C3):
    """C3 around spatial pyramid pooling."""

    def __init__(self, c1, c2, k=(5, 9, 13), n=1, shortcut=True, g=1, e=0.5):
        super().__init__(c1, c2, n, shortcut, g, e)
        hidden = int(c2 * e)
        self.m = SPP(hidden, hidden, k)


class GhostConv(nn.Module):
    """Half of the maps by convolution, the other half by a cheap depthwise one from them (arXiv:1911.11907)."""

    def __init__(self, c1, c2, k=1, s=1, g=1, act=True):
        super().__init__()
        hidden = c2 // 2
        self.cv1 = Conv(c1, hidden, k, s, None, g, act=act)
        self.cv2 = Conv(hidden, hidden, 5, 1, None, hidden, act=act)

    def forward(self, x):
        y = self.cv1(x)
        return torch.cat((y, self.cv2(y)), 1)


class GhostBottleneck(nn.Module):
    """Two ghost convolutions with a shortcut, and a depthwise one between them at stride 2."""

    def __init__(self, c1, c2, k=3, s=1):
        super().__init__()
        hidden = c2 // 2
        self.conv = nn.Sequential(
            GhostConv(c1, hidden, 1, 1),
            DWConv(hidden, hidden, k, s, act=False) if s == 2 else nn.Identity(),
            GhostConv(hidden, c2, 1, 1, act=False),
        )
        self.shortcut = (
            nn.Sequential(DWConv(c1, c1, k, s, act=False), Conv(c1, c2, 1, 1, act=False)) if s == 2 else nn.Identity()
        )

    def forward(self, x):
        return self.conv(x) + self.shortcut(x)


class C3Ghost(C3):
    """C3 of ghost bottlenecks."""

    @staticmethod
    def body(hidden, n, shortcut, g):
        return nn.Sequential(*(GhostBottleneck(hidden, hidden) for _ in range(n)))


class MixConv2d(nn.Module):
    """Convolutions of several kernel sizes side by side (arXiv:1907.09595), channels split evenly."""

    def __init__(self, c1, c2, k=(1, 3), s=1):
        super().__init__()
        share = [c2 // len(k) + (i < c2 % len(k)) for i in range(len(k))]
        self.m = nn.ModuleList(
            nn.Conv2d(c1, width, size, s, size // 2, groups=math.gcd(c1, width), bias=False)
            for size, width in zip(k, share)
        )
        self.bn = nn.BatchNorm2d(c2)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(torch.cat([conv(x) for conv in self.m], 1)))


class Contract(nn.Module):
    """Blocks of `gain` x `gain` pixels into channels: `[B, C, H, W]` to `[B, C·gain², H/gain, W/gain]`."""

    def __init__(self, gain=2):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        b, c, h, w = x.shape
        s = self.gain
        x = x.view(b, c, h // s, s, w // s, s).permute(0, 3, 5, 1, 2, 4)
        return x.reshape(b, c * s * s, h // s, w // s)


class Expand(nn.Module):
    """Channels into blocks of `gain` x `gain` pixels, the inverse of `Contract`."""

    def __init__(self, gain=2):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        b, c, h, w = x.shape
        s = self.gain
        x = x.view(b, s, s, c // s**2, h, w).permute(0, 3, 4, 1, 5, 2)
        return x.reshape(b, c // s**2, h * s, w * s)


class Focus(nn.Module):
    """Every second pixel into channels, then a convolution."""

    def __init__(self, c1, c2, k=1, s=1, p=None, g=1, act=True):
        super().__init__()
        self.conv = Conv(c1 * 4, c2, k, s, p, g, act=act)

    def forward(self, x):
        quarters = [x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.conv(torch.cat(quarters, 1))


class Concat(nn.Module):
    """Several maps into one along dimension `d`."""

    def __init__(self, d=1):
        super().__init__()
        self.d = d

    def forward(self, x: Sequence[torch.Tensor]):
        return torch.cat(list(x), self.d)


def global_max(x: torch.Tensor) -> torch.Tensor:
    """Maximum over each map, `[B, C, H, W]` to `[B, C, 1, 1]`.

    Value and gradient are those of `AdaptiveMaxPool2d(1)`: where the maximum occurs several times, the first
    position in reading order gets the whole gradient (`amax` would share it out). The gradient of `max` along a
    dimension is a scatter to distinct places, which is deterministic on CUDA, whereas adaptive pooling's is not.
    """
    return x.flatten(2).max(2).values[..., None, None]


def global_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean over each map, `[B, C, H, W]` to `[B, C, 1, 1]`."""
    return x.mean((2, 3), keepdim=True)


def hidden_width(c1: int, ratio: int, least: int = 1) -> int:
    """`c1 / ratio` channels, never below `least`."""
    if ratio < 1:
        raise ValueError(f"reduction must be 1 or more, found {ratio}")
    return max(int(c1 // ratio), least)


def odd(k: int) -> int:
    """`k` itself, refused where padding could not keep the size of the map."""
    if k < 1 or k % 2 != 1:
        raise ValueError(f"kernel size must be odd, found {k}")
    return k


def single_precision(x: torch.Tensor) -> torch.Tensor:
    """fp16 and bf16 as fp32, for sums of squares that would overflow; other types as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class BatchNorm(nn.BatchNorm2d):
    """Batch norm that in training mode uses its running statistics where a channel has one value only.

    One value has no variance: `nn.BatchNorm2d` raises there, for example on pooled maps with batch 1.
    """

    def forward(self, x):
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return super().forward(x)


class Attention(nn.Module):
    """Base of the blocks that weigh a map and keep its shape `[B, C, H, W]`, dtype and memory format.

    Constructors are `(c1, …, *, identity=False)`. With `identity` the new block returns its input bit for bit and
    learns from there: gates are 2σ instead of σ and their last projection starts at zero (`start_at_zero`), or a
    learned gain that starts at zero mixes in what would replace the map (`blend`). Without it, form and
    initialisation are the paper's.
    """

    def __init__(self, identity: bool = False):
        super().__init__()
        self.identity = identity

    def start_at_zero(self, *projections: nn.Module) -> None:
        """In identity mode, zero the weights and biases of `projections`."""
        for parameter in (p for projection in projections if self.identity for p in projection.parameters()):
            nn.init.zeros_(parameter)

    def add_gain(self) -> None:
        """In identity mode, the learned number `gain`; without dimensions, so that it changes no dtype."""
        if self.identity:
            self.gain = nn.Parameter(torch.zeros(()))

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        """σ(z), in identity mode 2σ(z), which is 1 at z = 0. Every sigmoid gate of every block passes here."""
        return 2 * z.sigmoid() if self.identity else z.sigmoid()

    def scale(self, x: torch.Tensor, *logits: torch.Tensor) -> torch.Tensor:
        """`x` times the gate of each of `logits`, in the dtype of `x`."""
        for z in logits:
            x = x * self.gate(z).to(x.dtype)
        return x

    def blend(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y` in place of `x`, in identity mode x + gain (y - x); dtype and memory format are those of `x`."""
        y = (x + self.gain * (y - x) if self.identity else y).to(x.dtype)
        return y.contiguous(memory_format=CHANNELS_LAST) if x.is_contiguous(memory_format=CHANNELS_LAST) else y


class SE(Attention):
    """Squeeze-and-excitation (arXiv:1709.01507): x · σ(W2 relu(W1 mean(x)))."""

    def __init__(self, c1, ratio=16, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio)
        self.fc1 = nn.Conv2d(c1, hidden, 1, bias=False)
        self.fc2 = nn.Conv2d(hidden, c1, 1, bias=False)
        self.start_at_zero(self.fc2)

    def forward(self, x):
        return self.scale(x, self.fc2(self.fc1(global_mean(x)).relu()))


class ECA(Attention):
    """Efficient channel attention (arXiv:1910.03151): x · σ(conv_k(mean(x))), a 1D convolution across the channels.

    The kernel is the odd number next to |log2(C) / gamma + b / gamma| by the paper's rule, unless `k` is given.
    """

    def __init__(self, c1, k=None, gamma=2, b=1, *, identity=False):
        super().__init__(identity)
        if k is None:
            k = int(abs((math.log2(c1) + b) / gamma))
            k += 1 - k % 2
        self.conv = nn.Conv1d(1, 1, odd(k), padding=k // 2, bias=False)
        self.start_at_zero(self.conv)

    def forward(self, x):
        means = x.mean((2, 3))[:, None]
        return self.scale(x, self.conv(means).transpose(1, 2)[..., None])


class ChannelGate(SE):
    """CBAM's channel part: x · σ(W2 relu(W1 mean(x)) + W2 relu(W1 max(x)))."""

    def forward(self, x):
        mean = self.fc2(self.fc1(global_mean(x)).relu())
        peak = self.fc2(self.fc1(global_max(x)).relu())
        return self.scale(x, mean + peak)


class SpatialGate(Attention):
    """CBAM's spatial part: x · σ(conv_k([mean; max])), both over the channels."""

    def __init__(self, k=7, *, identity=False):
        super().__init__(identity)
        self.conv = nn.Conv2d(2, 1, odd(k), padding=k // 2, bias=False)
        self.start_at_zero(self.conv)

    def forward(self, x):
        return self.scale(x, self.conv(torch.cat((x.mean(1, keepdim=True), x.max(1, keepdim=True).values), 1)))


class CBAM(Attention):
    """Convolutional block attention module (arXiv:1807.06521): channel gate, then spatial gate.

    `k` is the kernel of the spatial gate, `ratio` the reduction of the channel gate's perceptron.
    """

    def __init__(self, c1, k=7, ratio=16, *, identity=False):
        super().__init__(identity)
        self.channel = ChannelGate(c1, ratio, identity=identity)
        self.spatial = SpatialGate(k, identity=identity)

    def forward(self, x):
        return self.spatial(self.channel(x))


class BAM(Attention):
    """Bottleneck attention module (arXiv:1807.06514): x + x · σ(BN(MLP(mean(x))) + BN(f4 f3 f2 f1 x)).

    f1 and f4 are 1x1 convolutions to `c1 / ratio` channels and to one, f2 and f3 3x3 with dilation `d`, with ReLU
    between them. The paper's factor is never 1, so identity mode has x · 2σ(z).
    """

    def __init__(self, c1, ratio=16, d=4, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio)
        wide = {"padding": d, "dilation": d}
        self.channel = nn.Sequential(
            nn.Conv2d(c1, hidden, 1), nn.ReLU(), nn.Conv2d(hidden, c1, 1, bias=False), BatchNorm(c1)
        )
        self.spatial = nn.Sequential(
            *(nn.Conv2d(c1, hidden, 1), nn.ReLU()),
            *(nn.Conv2d(hidden, hidden, 3, **wide), nn.ReLU(), nn.Conv2d(hidden, hidden, 3, **wide), nn.ReLU()),
            *(nn.Conv2d(hidden, 1, 1, bias=False), BatchNorm(1)),
        )
        self.start_at_zero(self.channel[-1], self.spatial[-1])

    def forward(self, x):
        gate = self.gate(self.channel(global_mean(x)) + self.spatial(x))
        return x * (gate if self.identity else 1 + gate).to(x.dtype)


class SCSE(SE):
    """Concurrent spatial and channel excitation, scSE (arXiv:1803.02579): x · (σ(W2 relu(W1 mean(x))) + σ(w · x)).

    The sum of both gates is 1 where both projections are zero, so identity mode needs no factor 2.
    """

    def __init__(self, c1, ratio=2, *, identity=False):
        super().__init__(c1, ratio, identity=identity)
        self.conv = nn.Conv2d(c1, 1, 1, bias=False)
        self.start_at_zero(self.conv)

    def gate(self, z):
        return z.sigmoid()

    def forward(self, x):
        gates = self.gate(self.fc2(self.fc1(global_mean(x)).relu())) + self.gate(self.conv(x))
        return x * gates.to(x.dtype)


class CA(Attention):
    """Coordinate attention (arXiv:2103.02907): x · σ(F_h f_h) · σ(F_w f_w), [f_h; f_w] = hswish(BN(F1 [x_h; x_w])).

    x_h and x_w are the means of the rows and of the columns; at least 8 hidden channels, as the authors have it.
    """

    def __init__(self, c1, ratio=32, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio, least=8)
        self.conv = nn.Conv2d(c1, hidden, 1, bias=False)
        self.bn = BatchNorm(hidden)
        self.conv_h = nn.Conv2d(hidden, c1, 1)
        self.conv_w = nn.Conv2d(hidden, c1, 1)
        self.start_at_zero(self.conv_h, self.conv_w)

    def forward(self, x):
        h = x.shape[2]
        means = torch.cat((x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)), 2)
        y = F.hardswish(self.bn(self.conv(means)))
        return self.scale(x, self.conv_h(y[:, :, :h]), self.conv_w(y[:, :, h:].transpose(2, 3)))


class SimAM(Attention):
    """Parameter-free attention (SimAM, ICML 2021, PMLR 139:11863): x · σ(d / (4 (v + lam)) + 1/2).

    d = (x - mean(x))² and v = Σ d / (H W - 1) over each map. Identity mode has one learned number: x · 2σ(gain · …).
    """

    def __init__(self, c1, lam=1e-4, *, identity=False):
        super().__init__(identity)
        self.lam = lam
        self.add_gain()

    def forward(self, x):
        wide = single_precision(x)
        d = (wide - global_mean(wide)) ** 2
        others = torch.sym_max(x.shape[2] * x.shape[3] - 1, 1)  # a map of one pixel has v = 0
        z = d / (4 * (d.sum((2, 3), keepdim=True) / others + self.lam)) + 0.5
        return self.scale(x, self.gain * z if self.identity else z)
