"""The formulas once more, one number at a time.

Each function gives the scores `(S,)` of one KV head, of a prefill and a press; tokens that the
press protects score 0 here.
"""

import math

import torch
from torch.nn.functional import pad

from press_core.presses.keys import sketch
from tests.press_core.drawn import DIM, GROUP, HEADS, KV_HEADS, attention_row, rotated
from tests.slow import cosines, norms


def members(head):
    """The query heads of a KV head."""
    return range(head * GROUP, (head + 1) * GROUP)


def mean(states):
    return torch.stack([*states]).mean(dim=0)


def weights(call, row, head, token):
    """Causal attention of one query of one head, over all `S` keys."""
    return pad(attention_row(call, row, head, token), (0, call.length - token - 1))


def of_group(call, row, head, token):
    return mean([weights(call, row, member, token) for member in members(head)])


def pooled(scores, kernel):
    """Mean over neighbours, zeros beyond the ends."""
    reach = kernel // 2
    sums = [scores[max(0, j - reach) : j + reach + 1].sum() for j in range(len(scores))]
    return torch.stack(sums) / kernel


def knorm(call, _, row, head):
    return torch.tensor(norms(call.keys[row, head]))


def keydiff(call, _, row, head):
    return torch.tensor(cosines(call.keys[row, head]))


def snapkv(call, press, row, head):
    before = call.length - press.window_size
    votes = mean([of_group(call, row, head, token) for token in range(before, call.length)])
    return pad(pooled(votes[:before], press.kernel_size), (0, press.window_size))


def tova(call, _, row, __):
    return mean([weights(call, row, head, call.length - 1) for head in range(HEADS)])


def observed_attention(call, _, row, head):
    """Mean over the queries that see a key."""
    rows = torch.stack([of_group(call, row, head, token) for token in range(call.length)])
    return torch.stack([rows[j:, j].mean() for j in range(call.length)])


def expected_attention(call, press, row, head):
    n_sink, future = press.n_sink, range(call.length, call.length + press.n_future_positions)

    def turned(state):
        return mean([rotated(state, position) for position in future])

    def of_member(member):
        queries = call.query.states[row, member, n_sink:]
        anchor, logits = queries.mean(dim=0), []
        deviations = [turned(state - anchor) for state in queries]
        for key in call.keys[row, head, n_sink:]:
            logit = key @ turned(anchor) / math.sqrt(DIM)
            if press.use_covariance:  # k'Ck is the variance of <k, q> over the turned queries
                logit = logit + mean([(key @ x) ** 2 for x in deviations]) / (2 * DIM)
            logits.append(logit)
        return torch.stack(logits).softmax(dim=0)

    scores = mean([of_member(member) for member in members(head)])
    if press.use_vnorm:
        scores = (scores + press.epsilon) * call.values[row, head, n_sink:].norm(dim=-1)
    return pad(scores, (n_sink, 0))


def cap(call, press, row, head):
    tokens = range(press.n_sink, call.length)
    future = range(call.length, call.length + press.n_future_positions)
    keys, values = (x[row, head, press.n_sink :] for x in (call.keys, call.values))
    total = torch.zeros(call.length).double()
    for member in members(head):
        query = mean([call.query.states[row, member, t] for t in tokens])
        anchor = mean([rotated(query, position) for position in future])
        cosines = [float(key @ anchor / key.norm() / anchor.norm()) for key in keys]
        weighed = [math.exp(press.tau * (cosine - max(cosines))) for cosine in cosines]
        matrix = torch.eye(DIM).double()
        for value, weight in zip(values, weighed, strict=True):
            matrix += (weight + press.epsilon) * torch.outer(value, value)
        inverse = matrix.inverse()
        for token, value, weight in zip(tokens, values, weighed, strict=True):
            total[token] += weight * (value @ inverse @ value) / GROUP
    return total


def lagkv(call, press, row, head):
    lag, scores = press.lag_size, torch.zeros(call.length).double()
    for block in range((call.length - press.n_sink) // lag - 1):
        judged = slice(press.n_sink + block * lag, press.n_sink + (block + 1) * lag)
        reference = slice(judged.stop, judged.stop + lag)
        for states in (call.keys[row, head], call.values[row, head]):
            low, high = states[reference].amin(dim=0), states[reference].amax(dim=0)
            spreads = [((state - low) / (high - low)).std() for state in states[judged]]
            scores[judged] += torch.stack(spreads).softmax(dim=0) / 2
    return scores


def dropkv(call, press, row, head):
    """What the last outputs lose if a pair is taken out and they are computed again."""
    before = call.length - press.window_size
    losses = torch.zeros(before).double()
    for member in members(head):
        for token in range(before, call.length):
            paid = attention_row(call, row, member, token)
            values = call.values[row, head, : token + 1]
            for gone in range(before):
                without = paid.clone()
                without[gone] = 0
                moved = without / without.sum() @ values - paid @ values
                losses[gone] += moved.square().sum() / GROUP
    return pad(pooled(losses, press.kernel_size), (0, press.window_size))


def rkv(call, press, row, head):
    window, reach = press.window_size, press.kernel_size // 2
    before, keys = call.length - window, call.keys[row, head]
    important = torch.zeros(before).double()
    for token in range(before, call.length):
        rows = [weights(call, row, member, token)[:before] for member in members(head)]
        most = torch.stack(rows).amax(dim=0)
        for j in range(before):
            important[j] += most[max(0, j - reach) : j + reach + 1].max() / window
    repeated = torch.zeros(call.length, call.length).double()
    for i, one in enumerate(keys):
        for j, other in enumerate(keys):
            repeated[i, j] = one @ other / one.norm() / other.norm() if i != j else 0
        similar = [j for j in range(call.length) if repeated[i, j] > press.similarity_threshold]
        repeated[i, similar[max(0, len(similar) - press.n_retained) :]] = 0
    redundant = repeated.mean(dim=0).softmax(dim=0)[:before]
    return pad(press.mix_lambda * important - (1 - press.mix_lambda) * redundant, (0, window))


def cur(call, press, row, head):
    """Shares of squared norms, each divided by the sum of its window."""

    def leverage(states):
        if press.use_random_leverage:
            states = states @ sketch((DIM, 20), call.site.layer_idx, states)
        squares = torch.stack([state @ state for state in states])
        if not press.use_local_approximation:
            return squares
        width = press.local_window_size
        starts = [position - position % width for position in range(len(states))]
        return squares / torch.stack([squares[start : start + width].sum() for start in starts])

    k, v = (leverage(x[row, head]) for x in (call.keys, call.values))
    combined = {"key": k, "value": v, "kv_avg": (k + v) / 2, "kv_product": k * v}
    return combined[press.leverage_type] / combined[press.leverage_type].sum()


def qfilter(call, _, row, head):
    """How far a key lies against the filter."""
    direction = call.scope.known.directions[call.site.layer_idx, head]
    return torch.stack([-(key @ direction) for key in call.keys[row, head]])


def kvzap(call, _, row, head):
    """Each token through the regressor."""
    given, layer, scores = call.scope.known, call.site.layer_idx, []
    for state in call.hidden_states[row]:
        if given.hidden_weight is not None:
            hidden = given.hidden_weight[layer] @ state + given.hidden_bias[layer]
            state = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        scores.append(given.weight[layer, head] @ state + given.bias[layer, head])
    return torch.stack(scores)


# ---- Compactor: standardised over all tokens of all heads of a row -------------------------------


def _standardised(heads, head):
    scores = torch.stack(heads)
    return (scores[head] - scores.mean()) / scores.std()


def leverage(call, press, row, head, tokens=None):
    """`x (XᵀX + λI)⁻¹ xᵀ` of the centred keys before RoPE times a sketch."""
    width = press.sketch_dimension
    projection, heads = sketch((KV_HEADS, DIM, width), call.site.layer_idx, call.keys), []
    for of_head in range(KV_HEADS):
        states = call.keys[row, of_head]
        keys = torch.stack([rotated(states[j], -j) for j in tokens or range(call.length)])
        rows = (keys - keys.mean(dim=0)) @ projection[of_head] / math.sqrt(width)
        gram = sum((torch.outer(x, x) for x in rows), 1e-2 * torch.eye(width).double())
        heads.append(torch.stack([x @ torch.linalg.solve(gram, x) for x in rows]))
    return _standardised(heads, head)


def non_causal(call, press, row, head, tokens=None):
    """Column sums of each chunk's softmax, mean over the group, times `‖v‖`, pooled over three."""
    tokens, heads, size = tokens or range(call.length), [], press.chunk_size
    part = slice(tokens.start, tokens.stop)
    for of_head in range(KV_HEADS):
        keys, values = (x[row, of_head, part] for x in (call.keys, call.values))
        received = torch.zeros(len(tokens)).double()
        for start in range(0, len(tokens), size):
            chunk = slice(start, start + size)
            for member in members(of_head):
                for query in call.queries()[row, member, part][chunk]:
                    exponentials = torch.stack([key @ query for key in keys[chunk]]).exp()
                    received[chunk] += exponentials / exponentials.sum() / GROUP
        heads.append(pooled(received * values.square().sum(dim=-1).sqrt(), 3))
    return _standardised(heads, head)


def compactor(call, press, row, head):
    """Both, of the tokens between the two ends."""
    ends = press.sink_size_start, press.sink_size_end
    middle = range(ends[0], call.length - ends[1])
    if len(middle) < 2:
        return torch.zeros(call.length).double()
    weight = press.compression_ratio if press.blending is None else press.blending
    of_keys, received = (f(call, press, row, head, middle) for f in (leverage, non_causal))
    return pad(weight * of_keys + received, ends)
