"""The kernels, all in one file: machine code kept on disk is thrown away when the file changes.

Numba looks at the file of a kernel only, not at those of the kernels it calls. Arrays are dense and
of one dtype; scalars that meet fp32 numbers come in as fp32, because an integer times an fp32
number would be fp64. Called by the operators beside this file.
"""

from __future__ import annotations

import numpy as np

from headrace.ops.cpu.compiled.kernel import kernel, product_kernel
from headrace.ops.cpu.decode.arrays import Array

# Added to the sum of a row's expert weights.
_ROUTER_EPS = 1e-20


@kernel
def inverse_rms(row: Array, eps: float) -> float:
    """rsqrt(mean(row^2) + eps), summed in fp64, then rounded as the reference does."""
    number = row.dtype.type
    total = 0.0
    for d in range(row.size):
        total += row[d] * row[d]
    return number(1) / np.sqrt(number(number(total / row.size) + number(eps)))


@kernel
def norm_row(row: Array, weight: Array, eps: float, out: Array) -> None:
    """RMSNorm of one row; an empty weight counts as ones."""
    inverse = inverse_rms(row, eps)
    if weight.size:
        for d in range(row.size):
            out[d] = row[d] * inverse * weight[d]
    else:
        for d in range(row.size):
            out[d] = row[d] * inverse


@kernel
def norm(x: Array, weight: Array, eps: float, out: Array) -> None:
    """RMSNorm of the rows of x [n, width]."""
    for t in range(x.shape[0]):
        norm_row(x[t], weight, eps, out[t])


@kernel
def turn(x: Array, turn: Array, sign: int) -> None:
    """Rotate the last pairs of x [T, n, d] in place by turn [T, R, 2]; sign -1 turns back."""
    # An integer times an fp32 number would be fp64.
    factor = turn.dtype.type(sign)
    pairs = turn.shape[1]
    first = x.shape[2] - 2 * pairs
    for t in range(x.shape[0]):
        for row in x[t]:
            for r in range(pairs):
                even, odd = row[first + 2 * r], row[first + 2 * r + 1]
                c, s = turn[t, r, 0], factor * turn[t, r, 1]
                row[first + 2 * r] = even * c - odd * s
                row[first + 2 * r + 1] = even * s + odd * c


@kernel
def scale_rows(m: Array, flat: Array, scales: Array, base: Array, eps: float) -> None:
    """m [n, T] = m * rsqrt(mean(v^2) + eps) * scales + base; flat [T, hc * D] holds v."""
    for t in range(flat.shape[0]):
        inverse = inverse_rms(flat[t], eps)
        for n in range(m.shape[0]):
            m[n, t] = m[n, t] * inverse * scales[n] + base[n]


@kernel
def normalise(c: Array, total: Array, eps: float, columns: bool) -> None:
    """c [hc, hc, T] divided by its row or column sums plus eps; T is innermost, for vectors."""
    hc, _, rows = c.shape
    for i in range(hc):
        total[:] = 0
        for j in range(hc):
            part = c[j, i] if columns else c[i, j]
            for t in range(rows):
                total[t] += part[t]
        for t in range(rows):
            total[t] += eps
        for j in range(hc):
            part = c[j, i] if columns else c[i, j]
            for t in range(rows):
                part[t] /= total[t]


@kernel
def sinkhorn(c: Array, total: Array, eps: float, iterations: int) -> None:
    """`reference.sinkhorn` of logits c [hc, hc, T], in place."""
    hc, _, rows = c.shape
    for i in range(hc):
        total[:] = c[i, 0]
        for j in range(1, hc):
            for t in range(rows):
                total[t] = max(total[t], c[i, j, t])
        for j in range(hc):
            for t in range(rows):
                c[i, j, t] = np.exp(c[i, j, t] - total[t])
        total[:] = 0
        for j in range(hc):
            for t in range(rows):
                total[t] += c[i, j, t]
        for j in range(hc):
            for t in range(rows):
                c[i, j, t] = c[i, j, t] / total[t] + eps
    normalise(c, total, eps, True)
    for _ in range(iterations - 1):
        normalise(c, total, eps, False)
        normalise(c, total, eps, True)


@kernel
def gates(m: Array, factor: float, eps: float, out: Array) -> None:
    """out [T, n] = factor * sigmoid(m [n, T]) + eps; numbers of m's dtype."""
    one = m.dtype.type(1)
    for n in range(m.shape[0]):
        for t in range(m.shape[1]):
            out[t, n] = factor * (one / (one + np.exp(-m[n, t]))) + eps


@kernel
def collapse(v: Array, pre: Array, out: Array) -> None:
    """out [T, D] = sum_j pre[j] * v[j]."""
    rows, copies, width = v.shape
    for t in range(rows):
        for d in range(width):
            out[t, d] = pre[t, 0] * v[t, 0, d]
        for j in range(1, copies):
            for d in range(width):
                out[t, d] += pre[t, j] * v[t, j, d]


@kernel
def merge(y: Array, v: Array, post: Array, comb: Array, out: Array) -> None:
    """`reference.hc_merge`, summed in its order."""
    rows, copies, width = v.shape
    for t in range(rows):
        for k in range(copies):
            for d in range(width):
                out[t, k, d] = comb[t, 0, k] * v[t, 0, d]
            for j in range(1, copies):
                weight = comb[t, j, k]
                for d in range(width):
                    out[t, k, d] += weight * v[t, j, d]
            for d in range(width):
                out[t, k, d] += post[t, k] * y[t, d]


@kernel
def enter(
    m: Array,
    v: Array,
    given: Array,
    scales: Array,
    base: Array,
    norm: Array,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
    x: Array,
    own: Array,
    post: Array,
    comb: Array,
) -> None:
    """All of `reference.hc_enter` behind the projection m [n, T]; `given` is pre or `own`."""
    rows, hc, width = v.shape
    scale_rows(m, v.reshape(rows, hc * width), scales, base, rms_eps)
    number = m.dtype.type
    gates(m[:hc], number(1), hc_eps, own)
    gates(m[hc : 2 * hc], number(2), number(0), post)
    c = m[2 * hc :].reshape(hc, hc, rows)
    sinkhorn(c, np.empty(rows, m.dtype), hc_eps, iterations)
    for t in range(rows):
        for i in range(hc):
            for j in range(hc):
                comb[t, i, j] = c[i, j, t]
    collapse(v, given, x)
    for t in range(rows):
        norm_row(x[t], norm, rms_eps, x[t])


@product_kernel
def dots(q: Array, key: Array, scale: float, out: Array, place: int) -> None:
    """out[h, place] = q[h] . key * scale."""
    for h in range(q.shape[0]):
        total = q.dtype.type(0)
        for d in range(key.shape[0]):
            total += q[h, d] * key[d]
        out[h, place] = total * scale


@product_kernel
def logits(
    q: Array,
    window: Array,
    near: Array,
    entries: Array,
    far: Array,
    sink: Array,
    scale: float,
    out: Array,
) -> None:
    """out [T, H, W + K + 1]: logits minus their maximum, -inf for absent keys, the sink last."""
    rows, heads, count = out.shape
    for t in range(rows):
        for k in range(near.shape[1]):
            if near[t, k] < 0:
                out[t, :, k] = -np.inf
            else:
                dots(q[t], window[near[t, k]], scale, out[t], k)
        for k in range(far.shape[1]):
            if far[t, k] < 0:
                out[t, :, near.shape[1] + k] = -np.inf
            else:
                dots(q[t], entries[t, k], scale, out[t], near.shape[1] + k)
        for h in range(heads):
            row = out[t, h]
            row[count - 1] = sink[h]
            top = row[0]
            for k in range(1, count):
                top = max(top, row[k])
            for k in range(count):
                row[k] -= top


@product_kernel
def sums(p: Array, window: Array, near: Array, entries: Array, far: Array, out: Array) -> None:
    """out [T, H, d] = sum of keys weighted by p, divided by the sum of p (the sink's included)."""
    rows, heads, count = p.shape
    for t in range(rows):
        for h in range(heads):
            total = p[t, h, count - 1]
            row = out[t, h]
            row[:] = 0
            for k in range(near.shape[1]):
                if near[t, k] >= 0:
                    weight = p[t, h, k]
                    total += weight
                    key = window[near[t, k]]
                    for d in range(row.shape[0]):
                        row[d] += weight * key[d]
            for k in range(far.shape[1]):
                if far[t, k] >= 0:
                    weight = p[t, h, near.shape[1] + k]
                    total += weight
                    key = entries[t, k]
                    for d in range(row.shape[0]):
                        row[d] += weight * key[d]
            for d in range(row.shape[0]):
                row[d] /= total


@kernel
def pool(rows: Array, tokens: Array, ape: Array, overlap: bool, out: Array) -> None:
    """`reference.pool_entries`; an empty ape counts as zeros."""
    entries, n = tokens.shape
    half = rows.shape[1] // 2
    width = out.shape[1]
    top, total = np.empty(width, out.dtype), np.empty(width, out.dtype)
    for e in range(entries):
        top[:] = -np.inf
        total[:] = 0
        out[e] = 0
        for step in range(2):  # maxima, then sums
            for i in range(n):
                if tokens[e, i] < 0:
                    continue
                first = width if overlap and i >= n // 2 else 0
                row = rows[tokens[e, i]]
                kv, score = row[first : first + width], row[half + first : half + first + width]
                for d in range(width):
                    s = score[d]
                    if ape.size:
                        s += ape[i % ape.shape[0], first + d]
                    if step == 0:
                        top[d] = max(top[d], s)
                    else:
                        weight = np.exp(s - top[d])
                        total[d] += weight
                        out[e, d] += weight * kv[d]
        for d in range(width):
            out[e, d] /= total[d]


@kernel
def sift(values: Array, places: Array, size: int, start: int) -> None:
    """Restore the heap below `start`: the smallest value first, of equal ones the last place."""
    at = start
    while True:
        least, left = at, 2 * at + 1
        for child in (left, left + 1):
            if child < size and (
                values[child] < values[least]
                or (values[child] == values[least] and places[child] > places[least])
            ):
                least = child
        if least == at:
            return
        values[at], values[least] = values[least], values[at]
        places[at], places[least] = places[least], places[at]
        at = least


@kernel
def best(scores: Array, out: Array) -> None:
    """out [T, k]: the k best places of each row, ascending, -1 at the end."""
    rows, n = scores.shape
    k = out.shape[1]
    values = np.empty(k, scores.dtype)
    places = np.empty(k, np.int64)
    for t in range(rows):
        held = 0
        for i in range(n):
            s = scores[t, i]
            if not s > -np.inf:
                continue
            if held < k:
                values[held], places[held] = s, i
                held += 1
                if held == k:
                    for start in range(k // 2 - 1, -1, -1):
                        sift(values, places, k, start)
            elif s > values[0]:
                values[0], places[0] = s, i
                sift(values, places, k, 0)
        out[t, :held] = np.sort(places[:held])
        out[t, held:] = -1


@kernel
def scores(logits: Array) -> None:
    """sqrt(softplus(x)), in place."""
    flat = logits.reshape(-1)
    for i in range(flat.size):
        x = flat[i]
        flat[i] = np.sqrt(x if x > 20 else np.log1p(np.exp(x)))


@kernel
def route(scores: Array, bias: Array, experts: Array) -> None:
    """The best experts of each row by scores + bias, ties to the lowest expert."""
    rows, count = scores.shape
    taken = np.empty(count, np.bool_)
    for t in range(rows):
        taken[:] = False
        for k in range(experts.shape[1]):
            best = -1
            for e in range(count):
                if not taken[e] and (
                    best < 0 or scores[t, e] + bias[e] > scores[t, best] + bias[best]
                ):
                    best = e
            taken[best] = True
            experts[t, k] = best


@kernel
def weigh(scores: Array, experts: Array, normalise: bool, scaling: float, out: Array) -> None:
    """out [T, k]: the scores of the chosen experts, normalised and scaled."""
    for t in range(experts.shape[0]):
        total = out.dtype.type(0)
        for k in range(experts.shape[1]):
            out[t, k] = scores[t, experts[t, k]]
            total += out[t, k]
        total += out.dtype.type(_ROUTER_EPS)
        for k in range(experts.shape[1]):
            out[t, k] = (out[t, k] / total if normalise else out[t, k]) * scaling


@kernel
def activate(both: Array, weights: Array, limit: float, out: Array) -> None:
    """out [n, I] = SwiGLU of gate | up [n, 2I], times weights [n]."""
    inner, one = out.shape[1], out.dtype.type(1)
    for n in range(out.shape[0]):
        for i in range(inner):
            gate = min(both[n, i], limit)
            up = max(min(both[n, inner + i], limit), -limit)
            out[n, i] = gate / (one + np.exp(-gate)) * up * weights[n]


@product_kernel
def times(weight: Array, x: Array, out: Array) -> None:
    """out = weight @ x."""
    for n in range(weight.shape[0]):
        total = out.dtype.type(0)
        for d in range(x.shape[0]):
            total += weight[n, d] * x[d]
        out[n] = total


@product_kernel
def products(x: Array, experts: Array, w: Array, shared: Array, out: Array) -> None:
    """out [T * k + T, n]: w[e] @ x of each pair of row and expert, then shared @ x of each row.

    x [T, D] holds the inputs, or [T * k + T, D] one for each of those products.
    """
    rows, k = experts.shape
    each = x.shape[0] != rows
    for t in range(rows):
        for j in range(k):
            pair = t * k + j
            if experts[t, j] >= 0:
                times(w[experts[t, j]], x[pair if each else t], out[pair])
            else:
                out[pair] = 0
        pair = rows * k + t
        times(shared, x[pair if each else t], out[pair])


@kernel
def add_up(parts: Array, k: int, out: Array) -> None:
    """out [T, D]: the k parts of each row in order, then its shared one."""
    rows = out.shape[0]
    for t in range(rows):
        for d in range(out.shape[1]):
            out[t, d] = parts[t * k, d]
        for j in range(1, k):
            for d in range(out.shape[1]):
                out[t, d] += parts[t * k + j, d]
        for d in range(out.shape[1]):
            out[t, d] += parts[rows * k + t, d]
