"""Further attention blocks of the literature, and C3 and Conv with attention inside, under `models.common.Attention`.

All of them take any number of channels and any size of map: hidden widths never reach zero, and a number of groups or
heads is the largest divisor of the channels up to the one asked for. A bias that cannot change the output (in front
of a batch norm, or the same for all arguments of a softmax) is left out. There is no adaptive pooling, interpolation
or fused attention, whose gradients on CUDA are not deterministic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.common import (
    C3,
    CA,
    CBAM,
    ECA,
    SE,
    Attention,
    BatchNorm,
    Bottleneck,
    Conv,
    global_mean,
    hidden_width,
    odd,
    single_precision,
)


def largest_divisor(c1: int, g: int) -> int:
    """The largest divisor of `c1` that is not above `g`."""
    if g < 1:
        raise ValueError(f"groups or heads must be 1 or more, found {g}")
    return next(d for d in range(min(int(g), c1), 0, -1) if c1 % d == 0)


def standardize(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Each map minus its mean, over its standard deviation; eps under the root keeps the gradient of a flat map 0."""
    wide = single_precision(x)
    centred = wide - global_mean(wide)
    return (centred * (global_mean(centred**2) + eps).rsqrt()).to(x.dtype)


def positions(x: torch.Tensor) -> torch.Tensor:
    """Pixels as columns, `[B, C, H, W]` to `[B, C, H W]`."""
    return x.flatten(2)


class GAM(Attention):
    """Global attention mechanism (arXiv:2112.05561): x · σ(W2 relu(W1 x)), then · σ(BN(conv_k relu(BN(conv_k …)))).

    The perceptron runs over the channels of each pixel; nothing is pooled.
    """

    def __init__(self, c1, ratio=4, k=7, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio)
        self.fc1 = nn.Conv2d(c1, hidden, 1)
        self.fc2 = nn.Conv2d(hidden, c1, 1)
        self.conv1 = nn.Conv2d(c1, hidden, odd(k), padding=k // 2, bias=False)
        self.bn1 = BatchNorm(hidden)
        self.conv2 = nn.Conv2d(hidden, c1, k, padding=k // 2, bias=False)
        self.bn2 = BatchNorm(c1)
        self.start_at_zero(self.fc2, self.bn2)

    def forward(self, x):
        x = self.scale(x, self.fc2(self.fc1(x).relu()))
        return self.scale(x, self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())))


class NAM(Attention):
    """Normalization-based attention (arXiv:2111.12419), channel part: x · σ(w · BN(x)), w = |γ| / Σ|γ| of that norm.

    The paper's pixel part needs one scale for each position, so a fixed size of map; its authors leave it out too.
    Identity mode has one learned number: x · 2σ(gain · w · BN(x)).
    """

    def __init__(self, c1, *, identity=False):
        super().__init__(identity)
        self.bn = BatchNorm(c1)
        self.add_gain()

    def forward(self, x):
        importance = self.bn.weight.abs()
        total = importance.sum().clamp_min(torch.finfo(importance.dtype).tiny)
        z = self.bn(x) * (importance / total)[:, None, None]
        return self.scale(x, self.gain * z if self.identity else z)


class EMA(Attention):
    """Efficient multi-scale attention (arXiv:2305.13563): in each group x · σ(s(mean x1) · x2 + s(mean x2) · x1).

    x1 is the group weighed by its rows' and columns' means and normalised, x2 its 3x3 convolution, s the softmax over
    its channels. All groups share the parameters.
    """

    def __init__(self, c1, g=8, *, identity=False):
        super().__init__(identity)
        self.g = largest_divisor(c1, g)
        width = c1 // self.g
        self.conv1 = nn.Conv2d(width, width, 1)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(width, width)
        self.start_at_zero(self.conv3, self.norm)

    def forward(self, x):
        h = x.shape[2]
        groups = x.unflatten(1, (self.g, -1))
        each = groups.flatten(0, 1)
        lines = self.conv1(torch.cat((each.mean(3, keepdim=True), each.mean(2, keepdim=True).transpose(2, 3)), 2))
        weighed = each * lines[:, :, :h].sigmoid() * lines[:, :, h:].transpose(2, 3).sigmoid()
        norm = self.norm  # its own forward refuses maps of one pixel
        x1 = torch.group_norm(weighed, norm.num_groups, norm.weight, norm.bias, norm.eps)
        x2 = self.conv3(each)
        z = (global_mean(x1).softmax(1) * x2 + global_mean(x2).softmax(1) * x1).sum(1, keepdim=True)
        return self.scale(groups, z.unflatten(0, (-1, self.g))).flatten(1, 2)


class SK(Attention):
    """Selective kernels (arXiv:1903.06586): a · U3 + (1 - a) · U5 with a softmax over both for each channel.

    U3 and U5 are relu(BN(grouped 3x3 convolution)) with dilation 1 and 2, the softmax is of
    A relu(BN(W mean(U3 + U5))), at least 32 channels wide inside, as in the paper. Identity mode mixes the result in
    by a learned gain.
    """

    def __init__(self, c1, ratio=16, g=32, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio, least=32)
        groups = largest_divisor(c1, g)
        self.conv = nn.ModuleList(nn.Conv2d(c1, c1, 3, 1, d, d, groups, bias=False) for d in (1, 2))
        self.bn = nn.ModuleList(BatchNorm(c1) for _ in (1, 2))
        self.fc1 = nn.Conv2d(c1, hidden, 1, bias=False)
        self.bn1 = BatchNorm(hidden)
        self.fc2 = nn.Conv2d(hidden, 2 * c1, 1, bias=False)
        self.add_gain()

    def forward(self, x):
        u3, u5 = (bn(conv(x)).relu() for conv, bn in zip(self.conv, self.bn))
        logits = self.fc2(self.bn1(self.fc1(global_mean(u3 + u5))).relu())
        a3, a5 = logits.unflatten(1, (2, -1)).softmax(1).unbind(1)
        return self.blend(x, u3 * a3 + u5 * a5)


class ShuffleAttention(Attention):
    """Shuffle attention (arXiv:2102.00063): in each group, x1 · σ(w1 mean(x1) + b1) and x2 · σ(w2 GN(x2) + b2).

    x1 and x2 are the halves of the group; in a group of odd width the middle channel belongs to both. At the end the
    channels of both halves of the map are interleaved, where their number is even. All groups share the parameters.
    Identity mode leaves the order of the channels, which pretrained layers rely on.
    """

    def __init__(self, c1, g=64, *, identity=False):
        super().__init__(identity)
        self.g = largest_divisor(c1, min(g, max(c1 // 2, 1)))
        self.part = (c1 // self.g + 1) // 2
        self.rest = c1 // self.g - self.part
        self.weight = nn.Parameter(torch.zeros(2, self.part, 1, 1))
        self.bias = nn.Parameter(torch.zeros(2, self.part, 1, 1) if identity else torch.ones(2, self.part, 1, 1))
        self.shuffled = c1 % 2 == 0 and not identity

    def forward(self, x):
        groups = x.unflatten(1, (self.g, -1))
        each = groups.flatten(0, 1)
        channel = self.gate(self.weight[0] * global_mean(each[:, : self.part]) + self.bias[0])
        spatial = self.gate(self.weight[1] * standardize(each[:, self.rest :]) + self.bias[1])
        gates = F.pad(channel, (0, 0, 0, 0, 0, self.rest), value=1.0) * F.pad(
            spatial, (0, 0, 0, 0, self.rest, 0), value=1.0
        )
        y = (groups * gates.unflatten(0, (-1, self.g)).to(x.dtype)).flatten(1, 2)
        if not self.shuffled:
            return y
        y = y.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return self.blend(x, y)


class TripletAttention(Attention):
    """Triplet attention (arXiv:2010.03045): x · mean of σ(BN(conv_k([max; mean]))) over H, over W and over C.

    Each gate lies in the plane of the two dimensions that are left.
    """

    def __init__(self, c1, k=7, *, identity=False):
        super().__init__(identity)
        self.conv = nn.ModuleList(nn.Conv2d(2, 1, odd(k), padding=k // 2, bias=False) for _ in range(3))
        self.bn = nn.ModuleList(BatchNorm(1) for _ in range(3))
        self.start_at_zero(self.bn)

    def forward(self, x):
        gates = []
        for dim, conv, bn in zip((2, 3, 1), self.conv, self.bn):
            plane = torch.stack((x.max(dim).values, x.mean(dim)), 1)
            gates.append(self.gate(bn(conv(plane))).squeeze(1).unsqueeze(dim))
        return x * (sum(gates) / 3).to(x.dtype)


class SGE(Attention):
    """Spatial group-wise enhance (arXiv:1905.09646): in each group x · σ(γ n(mean(x) · x) + β).

    n subtracts the mean of that map of products and divides by its standard deviation; γ starts at 0, β at 1.
    """

    def __init__(self, c1, g=64, *, identity=False):
        super().__init__(identity)
        self.g = largest_divisor(c1, g)
        self.weight = nn.Parameter(torch.zeros(self.g, 1, 1))
        self.bias = nn.Parameter(torch.zeros(self.g, 1, 1) if identity else torch.ones(self.g, 1, 1))

    def forward(self, x):
        groups = x.unflatten(1, (self.g, -1))
        similarity = (groups * groups.mean((3, 4), keepdim=True)).sum(2)
        z = standardize(similarity) * self.weight + self.bias
        return self.scale(groups, z.unsqueeze(2)).flatten(1, 2)


class GlobalContext(Attention):
    """GCNet's global context (arXiv:1904.11492): x + W2 relu(LN(W1 Σ_j softmax_j(Wk x) x_j)).

    At least 4 hidden channels, because the layer norm of one is a constant. W2 starts at zero, as the authors have it.
    """

    def __init__(self, c1, ratio=16, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio, least=4)
        self.key = nn.Conv2d(c1, 1, 1, bias=False)
        self.fc1 = nn.Linear(c1, hidden)
        self.ln = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, c1)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x):
        weights = positions(self.key(x)).softmax(2)
        context = (positions(x) @ weights.transpose(1, 2).to(x.dtype)).squeeze(2)
        return x + self.fc2(self.ln(self.fc1(context)).relu())[..., None, None].to(x.dtype)


class EffectiveSE(Attention):
    """Effective squeeze-and-excitation (arXiv:1911.06667): x · σ(W mean(x)), one full projection."""

    def __init__(self, c1, *, identity=False):
        super().__init__(identity)
        self.fc = nn.Conv2d(c1, c1, 1)
        self.start_at_zero(self.fc)

    def forward(self, x):
        return self.scale(x, self.fc(global_mean(x)))


class PolarizedSequential(Attention):
    """Polarized self-attention, sequential (arXiv:2107.00782): a channel gate, then a spatial gate.

    y = x · σ(LN(Wz (Wv x · softmax_HW(Wq x)))), then y · σ(softmax_C(mean(Wq' y)) · Wv' y), C/2 channels inside.
    """

    def __init__(self, c1, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, 2)
        self.channel_q = nn.Conv2d(c1, 1, 1, bias=False)
        self.channel_v = nn.Conv2d(c1, hidden, 1)
        self.channel_z = nn.Linear(hidden, c1)
        self.ln = nn.LayerNorm(c1)
        self.spatial_q = nn.Conv2d(c1, hidden, 1)
        self.spatial_v = nn.Conv2d(c1, hidden, 1)
        self.start_at_zero(self.ln, self.spatial_v)

    def forward(self, x):
        q = positions(self.channel_q(x)).softmax(2)
        v = positions(self.channel_v(x))
        y = self.scale(x, self.ln(self.channel_z((v @ q.transpose(1, 2).to(v.dtype)).squeeze(2)))[..., None, None])
        q = global_mean(self.spatial_q(y)).softmax(1)
        return self.scale(y, (q * self.spatial_v(y)).sum(1, keepdim=True))


class DoubleAttention(Attention):
    """Double attention (arXiv:1810.11579): x + Wz (A softmax_HW(B)^T softmax_C(V)), A, B, V 1x1 convolutions of x.

    C / ratio features are gathered from all pixels, then handed out to each.
    """

    def __init__(self, c1, ratio=4, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio)
        self.a = nn.Conv2d(c1, hidden, 1)
        self.b = nn.Conv2d(c1, hidden, 1, bias=False)
        self.v = nn.Conv2d(c1, hidden, 1)
        self.out = nn.Conv2d(hidden, c1, 1)
        self.start_at_zero(self.out)

    def forward(self, x):
        a, b, v = (positions(conv(x)) for conv in (self.a, self.b, self.v))
        gathered = a @ b.softmax(2).transpose(1, 2).to(a.dtype)
        y = gathered @ v.softmax(1).to(a.dtype)
        return x + self.out(y.unflatten(2, x.shape[2:])).to(x.dtype)


class CrissCross(Attention):
    """Criss-cross attention (arXiv:1811.11721): x + γ Σ softmax(q · k) v over the pixel's row and column.

    The pixel itself counts once, γ starts at 0. Two in a row (number 2) reach every pixel from every other; the paper
    shares their parameters.
    """

    def __init__(self, c1, ratio=8, *, identity=False):
        super().__init__(identity)
        hidden = hidden_width(c1, ratio)
        self.q = nn.Conv2d(c1, hidden, 1)
        self.k = nn.Conv2d(c1, hidden, 1, bias=False)
        self.v = nn.Conv2d(c1, c1, 1)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = x.shape[2]
        rows_q, rows_k, rows_v = (conv(x).permute(0, 2, 3, 1) for conv in (self.q, self.k, self.v))  # [B, H, W, C]
        columns_q, columns_k, columns_v = (t.transpose(1, 2) for t in (rows_q, rows_k, rows_v))  # [B, W, H, C]
        index = torch.arange(h, device=x.device)
        along_column = columns_q @ columns_k.transpose(2, 3)  # [B, W, H, H]
        along_column = along_column.masked_fill(index[:, None] == index, float("-inf"))
        along_row = rows_q @ rows_k.transpose(2, 3)  # [B, H, W, W]
        weights = torch.cat((along_column.transpose(1, 2), along_row), 3).softmax(3).to(rows_v.dtype)
        from_column = weights[..., :h].transpose(1, 2) @ columns_v
        y = from_column.transpose(1, 2) + weights[..., h:] @ rows_v
        return x + (self.gain * y.permute(0, 3, 1, 2)).to(x.dtype)


class ParNetAttention(Attention):
    """ParNet's block (arXiv:2110.07641): silu(BN(conv1 x) + BN(conv3 x) + n · σ(W mean(n))), n = BN(x).

    The last term is its skip-squeeze-excitation. Identity mode mixes the result in by a learned gain.
    """

    def __init__(self, c1, *, identity=False):
        super().__init__(identity)
        self.conv1 = nn.Conv2d(c1, c1, 1, bias=False)
        self.conv3 = nn.Conv2d(c1, c1, 3, padding=1, bias=False)
        self.bn1, self.bn3, self.bn = BatchNorm(c1), BatchNorm(c1), BatchNorm(c1)
        self.fc = nn.Conv2d(c1, c1, 1)
        self.add_gain()

    def forward(self, x):
        n = self.bn(x)
        skip = n * self.fc(global_mean(n)).sigmoid()
        return self.blend(x, F.silu(self.bn1(self.conv1(x)) + self.bn3(self.conv3(x)) + skip))


class LSKA(Attention):
    """Large separable kernel attention (arXiv:2309.01439): x · W z, z four depthwise 1D convolutions of x in a row.

    Kernel `k` is made of 2d - 1 pixels along each axis, then k // d pixels (the next odd number) at dilation d, with
    d = 3, or 2 up to k = 11, as the authors have it. Identity mode starts with W = 0 and its bias 1.
    """

    def __init__(self, c1, k=23, *, identity=False):
        super().__init__(identity)
        d = 2 if odd(k) <= 11 else 3
        near, far = 2 * d - 1, k // d + (k // d + 1) % 2
        reach = d * (far // 2)
        self.near_w = nn.Conv2d(c1, c1, (1, near), padding=(0, near // 2), groups=c1)
        self.near_h = nn.Conv2d(c1, c1, (near, 1), padding=(near // 2, 0), groups=c1)
        self.far_w = nn.Conv2d(c1, c1, (1, far), padding=(0, reach), groups=c1, dilation=(1, d))
        self.far_h = nn.Conv2d(c1, c1, (far, 1), padding=(reach, 0), groups=c1, dilation=(d, 1))
        self.out = nn.Conv2d(c1, c1, 1)
        self.start_at_zero(self.out)
        if identity:
            nn.init.ones_(self.out.bias)

    def forward(self, x):
        z = self.far_h(self.far_w(self.near_h(self.near_w(x))))
        return x * self.out(z).to(x.dtype)


class MHSA(Attention):
    """Multi-head self-attention over the map (arXiv:2101.11605): softmax((q · k + q · r) / sqrt(d)) v, d = C / heads.

    r is the position of the key. The paper learns one vector for each row and column, so for one size of map; here
    r = Rh s(row) + Rw s(column) with s the sines and cosines of 8 frequencies, for any size. Identity mode mixes the
    result in by a learned gain. Memory grows with (H W)².
    """

    frequencies = 8

    def __init__(self, c1, heads=4, *, identity=False):
        super().__init__(identity)
        self.heads = largest_divisor(c1, heads)
        self.q = nn.Conv2d(c1, c1, 1)
        self.k = nn.Conv2d(c1, c1, 1, bias=False)
        self.v = nn.Conv2d(c1, c1, 1)
        self.row = nn.Linear(2 * self.frequencies, c1, bias=False)
        self.column = nn.Linear(2 * self.frequencies, c1, bias=False)
        self.add_gain()

    def waves(self, n: int, like: torch.Tensor) -> torch.Tensor:
        """Sines and cosines of the positions 0 … n - 1, wavelengths 2π to 2π · 1000: `[n, 2 · frequencies]`."""
        kind = {"device": like.device, "dtype": torch.promote_types(like.dtype, torch.float32)}
        octave = torch.arange(self.frequencies, **kind) / (self.frequencies - 1)
        angle = torch.arange(n, **kind)[:, None] * 1000**-octave
        return torch.cat((angle.sin(), angle.cos()), 1).to(like.dtype)

    def forward(self, x):
        h, w = x.shape[2:]
        rows = self.row(self.waves(h, self.row.weight))
        columns = self.column(self.waves(w, self.column.weight))
        r = (rows[:, None] + columns).flatten(0, 1).t()  # [C, H W]
        q, k, v = (positions(conv(x)) for conv in (self.q, self.k, self.v))
        q, k, v = (t.unflatten(1, (self.heads, -1)) for t in (q, k + r.to(k.dtype), v))  # [B, heads, d, H W]
        weights = ((q * q.shape[2] ** -0.5).transpose(2, 3) @ k).softmax(3).to(v.dtype)
        y = (v @ weights.transpose(2, 3)).flatten(1, 2)
        return self.blend(x, y.unflatten(2, (h, w)))


class AttentionBottleneck(Bottleneck):
    """A bottleneck whose `attention` weighs what is added to the shortcut; nothing until one is put there."""

    def __init__(self, c1, c2, shortcut=True, g=1, e=0.5):
        super().__init__(c1, c2, shortcut, g, e)
        self.attention = nn.Identity()

    def forward(self, x):
        y = self.attention(self.cv2(self.cv1(x)))
        return x + y if self.add else y


class C3Attention(C3):
    """C3 with attention (`block`) at the end of each bottleneck, before its shortcut; C3's names are kept."""

    block: type[Attention]

    def __init__(self, c1, c2, n=1, shortcut=True, g=1, e=0.5, *, identity=False):
        super().__init__(c1, c2, n, shortcut, g, e)
        for bottleneck in self.m:
            bottleneck.attention = self.block(int(c2 * e), identity=identity)

    @staticmethod
    def body(hidden, n, shortcut, g):
        return nn.Sequential(*(AttentionBottleneck(hidden, hidden, shortcut, g, e=1.0) for _ in range(n)))


class C3SE(C3Attention):
    block = SE


class C3ECA(C3Attention):
    block = ECA


class C3CA(C3Attention):
    block = CA


class C3CBAM(C3Attention):
    block = CBAM


class ConvCBAM(Conv):
    """`Conv`, then CBAM."""

    def __init__(self, c1, c2, k=1, s=1, p=None, g=1, d=1, act=True, *, identity=False):
        super().__init__(c1, c2, k, s, p, g, d, act)
        self.attention = CBAM(c2, identity=identity)

    def forward(self, x):
        return self.attention(super().forward(x))
