"""Attention blocks written plainly in NumPy from their papers: loops over channels and pixels, one image at a time.

Each function takes one image `[C, H, W]` and the block's parameters and buffers by name, as in its state dict.
"""

from __future__ import annotations

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def conv(x, weight, bias=None, dilation=(1, 1), groups=1):
    """Convolution with zeros around, same size: `x` [C, H, W], `weight` [O, C / groups, kh, kw]."""
    c, h, w = x.shape
    o, per, kh, kw = weight.shape
    dy, dx = dilation
    top, left = dy * (kh // 2), dx * (kw // 2)
    padded = np.zeros((c, h + 2 * top, w + 2 * left))
    padded[:, top : top + h, left : left + w] = x
    out = np.zeros((o, h, w))
    for n in range(o):
        first = n // (o // groups) * per
        for i in range(kh):
            for j in range(kw):
                window = padded[first : first + per, i * dy : i * dy + h, j * dx : j * dx + w]
                out[n] += np.tensordot(weight[n, :, i, j], window, 1)
        if bias is not None:
            out[n] += bias[n]
    return out


def norm(x, p, name, eps=1e-5):
    """Batch norm in evaluation mode over the first axis."""
    shape = (-1,) + (1,) * (x.ndim - 1)
    mean, var, weight, bias = (
        p[f"{name}.{part}"].reshape(shape) for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / np.sqrt(var + eps) * weight + bias


def layer_norm(v, p, name):
    return (v - v.mean()) / np.sqrt(v.var() + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def flat(p, name):
    """The weight of a 1x1 convolution as a matrix."""
    return p[f"{name}.weight"].reshape(p[f"{name}.weight"].shape[:2])


def means(x):
    return np.array([channel.sum() / channel.size for channel in x])


def weigh(x, gates):
    return np.stack([channel * gate for channel, gate in zip(x, gates)])


def se(x, p):
    return weigh(x, sigmoid(flat(p, "fc2") @ relu(flat(p, "fc1") @ means(x))))


def eca(x, p):
    kernel, average, gates = p["conv.weight"][0, 0], means(x), []
    reach = len(kernel) // 2
    for c in range(len(x)):
        near = [(k, c + k - reach) for k in range(len(kernel)) if 0 <= c + k - reach < len(x)]
        gates.append(sigmoid(sum(kernel[k] * average[i] for k, i in near)))
    return weigh(x, gates)


def cbam(x, p):
    w1, w2 = flat(p, "channel.fc1"), flat(p, "channel.fc2")
    peaks = np.array([channel.max() for channel in x])
    y = weigh(x, sigmoid(w2 @ relu(w1 @ means(x)) + w2 @ relu(w1 @ peaks)))
    return y * sigmoid(conv(np.stack([y.mean(0), y.max(0)]), p["spatial.conv.weight"]))


def bam(x, p, d=4):
    hidden = relu(flat(p, "channel.0") @ means(x) + p["channel.0.bias"])
    channel = norm(flat(p, "channel.2") @ hidden, p, "channel.3")
    y = relu(conv(x, p["spatial.0.weight"], p["spatial.0.bias"]))
    for name in ("spatial.2", "spatial.4"):
        y = relu(conv(y, p[f"{name}.weight"], p[f"{name}.bias"], (d, d)))
    spatial = norm(conv(y, p["spatial.6.weight"]), p, "spatial.7")[0]
    out = np.empty_like(x)
    for c, i, j in np.ndindex(*x.shape):
        out[c, i, j] = x[c, i, j] + x[c, i, j] * sigmoid(channel[c] + spatial[i, j])
    return out


def scse(x, p):
    spatial = sigmoid(np.tensordot(p["conv.weight"][0, :, 0, 0], x, 1))
    return se(x, p) + x * spatial


def ca(x, p):
    c, h, w = x.shape
    hswish = lambda v: v * np.clip(v + 3, 0, 6) / 6  # noqa: E731
    rows = [hswish(norm(flat(p, "conv") @ x[:, i].mean(1), p, "bn")) for i in range(h)]
    columns = [hswish(norm(flat(p, "conv") @ x[:, :, j].mean(1), p, "bn")) for j in range(w)]
    out = np.empty_like(x)
    for i in range(h):
        for j in range(w):
            row = sigmoid(flat(p, "conv_h") @ rows[i] + p["conv_h.bias"])
            out[:, i, j] = x[:, i, j] * row * sigmoid(flat(p, "conv_w") @ columns[j] + p["conv_w.bias"])
    return out


def simam(x, p, lam=1e-4):
    """By the minimal energy of each neuron: e = 4 (v + lam) / (d + 2 v + 2 lam), the gate is σ(1 / e)."""
    out = np.empty_like(x)
    for c in range(len(x)):
        v = x[c].var(ddof=1)
        d = (x[c] - x[c].mean()) ** 2
        energy = 4 * (v + lam) / (d + 2 * v + 2 * lam)
        out[c] = x[c] * sigmoid(1 / energy)
    return out


def gam(x, p):
    c, h, w = x.shape
    y = np.empty_like(x)
    for i in range(h):
        for j in range(w):
            z = flat(p, "fc2") @ relu(flat(p, "fc1") @ x[:, i, j] + p["fc1.bias"]) + p["fc2.bias"]
            y[:, i, j] = x[:, i, j] * sigmoid(z)
    hidden = relu(norm(conv(y, p["conv1.weight"]), p, "bn1"))
    return y * sigmoid(norm(conv(hidden, p["conv2.weight"]), p, "bn2"))


def nam(x, p):
    total = sum(abs(g) for g in p["bn.weight"])
    return x * sigmoid(weigh(norm(x, p, "bn"), [abs(g) / total for g in p["bn.weight"]]))


def ema(x, p, g):
    out = []
    for part in np.split(x, g):
        line = lambda v: flat(p, "conv1") @ v + p["conv1.bias"][:, None]  # noqa: E731
        rows, columns = sigmoid(line(part.mean(2))), sigmoid(line(part.mean(1)))
        y = part * rows[:, :, None] * columns[:, None, :]
        y = weigh(np.stack([(m - m.mean()) / np.sqrt(m.var() + 1e-5) for m in y]), p["norm.weight"])
        x1 = y + p["norm.bias"][:, None, None]
        x2 = conv(part, p["conv3.weight"], p["conv3.bias"])
        z = np.tensordot(softmax(means(x1), 0), x2, 1) + np.tensordot(softmax(means(x2), 0), x1, 1)
        out.append(part * sigmoid(z))
    return np.concatenate(out)


def sk(x, p, g):
    u = [relu(norm(conv(x, p[f"conv.{i}.weight"], None, (i + 1, i + 1), g), p, f"bn.{i}")) for i in (0, 1)]
    z = relu(norm(flat(p, "fc1") @ means(u[0] + u[1]), p, "bn1"))
    a, b = np.split(flat(p, "fc2") @ z, 2)
    return weigh(u[0], np.exp(a) / (np.exp(a) + np.exp(b))) + weigh(u[1], np.exp(b) / (np.exp(a) + np.exp(b)))


def shuffle(x, p, g):
    (wc, ws), (bc, bs) = p["weight"][:, :, 0, 0], p["bias"][:, :, 0, 0]
    parts = []
    for part in np.split(x, g):
        first, second = np.split(part, 2)
        parts += [m * sigmoid(w * m.mean() + b) for m, w, b in zip(first, wc, bc)]
        parts += [m * sigmoid(w * (m - m.mean()) / np.sqrt(m.var() + 1e-5) + b) for m, w, b in zip(second, ws, bs)]
    half = len(parts) // 2
    return np.stack([parts[i // 2 + half * (i % 2)] for i in range(len(parts))])


def triplet(x, p):
    """As the paper draws it: rotate, gate over the first axis, rotate back."""
    out = np.zeros_like(x)
    for n, order in enumerate([(1, 0, 2), (2, 0, 1), (0, 1, 2)]):
        y = x.transpose(order)
        z = norm(conv(np.stack([y.max(0), y.mean(0)]), p[f"conv.{n}.weight"]), p, f"bn.{n}")
        out += (y * sigmoid(z)).transpose(np.argsort(order)) / 3
    return out


def sge(x, p, g):
    out = []
    for part, w, b in zip(np.split(x, g), p["weight"].ravel(), p["bias"].ravel()):
        c = np.tensordot(means(part), part, 1)
        out.append(part * sigmoid(w * (c - c.mean()) / np.sqrt(c.var() + 1e-5) + b))
    return np.concatenate(out)


def global_context(x, p):
    weights = softmax(np.tensordot(p["key.weight"][0, :, 0, 0], x, 1).ravel(), 0)
    context = x.reshape(len(x), -1) @ weights
    hidden = relu(layer_norm(p["fc1.weight"] @ context + p["fc1.bias"], p, "ln"))
    return x + (p["fc2.weight"] @ hidden + p["fc2.bias"])[:, None, None]


def effective_se(x, p):
    return weigh(x, sigmoid(flat(p, "fc") @ means(x) + p["fc.bias"]))


def polarized(x, p):
    q = softmax(conv(x, p["channel_q.weight"]).ravel(), 0)
    v = conv(x, p["channel_v.weight"], p["channel_v.bias"]).reshape(-1, q.size)
    y = weigh(x, sigmoid(layer_norm(p["channel_z.weight"] @ (v @ q) + p["channel_z.bias"], p, "ln")))
    q = softmax(means(conv(y, p["spatial_q.weight"], p["spatial_q.bias"])), 0)
    return y * sigmoid(np.tensordot(q, conv(y, p["spatial_v.weight"], p["spatial_v.bias"]), 1))


def double(x, p):
    c, h, w = x.shape
    a = conv(x, p["a.weight"], p["a.bias"])
    b = conv(x, p["b.weight"])
    v = conv(x, p["v.weight"], p["v.bias"])
    gathered = []
    for row in b:
        weights = softmax(row.ravel(), 0).reshape(h, w)
        gathered.append(np.array([(m * weights).sum() for m in a]))
    handed = np.zeros((len(a), h, w))
    for i in range(h):
        for j in range(w):
            for share, feature in zip(softmax(v[:, i, j], 0), gathered):
                handed[:, i, j] += share * feature
    return x + conv(handed, p["out.weight"], p["out.bias"])


def criss_cross(x, p):
    q = conv(x, p["q.weight"], p["q.bias"])
    k = conv(x, p["k.weight"])
    v = conv(x, p["v.weight"], p["v.bias"])
    c, h, w = x.shape
    out = np.empty_like(x)
    for i in range(h):
        for j in range(w):
            seen = [(i, b) for b in range(w)] + [(a, j) for a in range(h) if a != i]
            weights = softmax(np.array([q[:, i, j] @ k[:, a, b] for a, b in seen]), 0)
            out[:, i, j] = x[:, i, j] + p["gain"] * sum(s * v[:, a, b] for s, (a, b) in zip(weights, seen))
    return out


def parnet(x, p):
    n = norm(x, p, "bn")
    y = norm(conv(x, p["conv1.weight"]), p, "bn1") + norm(conv(x, p["conv3.weight"]), p, "bn3")
    y += weigh(n, sigmoid(flat(p, "fc") @ means(n) + p["fc.bias"]))
    return y * sigmoid(y)


def lska(x, p):
    """For k = 23: 5 pixels, then 7 at dilation 3, along the rows and the columns."""
    z, c = x, len(x)
    for name, dilation in (("near_w", (1, 1)), ("near_h", (1, 1)), ("far_w", (1, 3)), ("far_h", (3, 1))):
        z = conv(z, p[f"{name}.weight"], p[f"{name}.bias"], dilation, c)
    assert p["near_h.weight"].shape[2:] == (5, 1) and p["far_w.weight"].shape[2:] == (1, 7)
    return x * conv(z, p["out.weight"], p["out.bias"])


def mhsa(x, p, heads):
    c, h, w = x.shape
    q = conv(x, p["q.weight"], p["q.bias"])
    k = conv(x, p["k.weight"])
    v = conv(x, p["v.weight"], p["v.bias"])
    wave = lambda t: np.array([f(t * 1000 ** (-n / 7)) for f in (math.sin, math.cos) for n in range(8)])  # noqa: E731
    out = np.zeros_like(x)
    pixels = list(np.ndindex(h, w))
    for part in np.split(np.arange(c), heads):
        for i, j in pixels:
            logits = []
            for a, b in pixels:
                r = p["row.weight"] @ wave(a) + p["column.weight"] @ wave(b)
                logits.append(q[part, i, j] @ (k[part, a, b] + r[part]) / math.sqrt(len(part)))
            for share, (a, b) in zip(softmax(np.array(logits), 0), pixels):
                out[part, i, j] += share * v[part, a, b]
    return out
