"""Every formula once more, in plain Python loops over lists: what the vectorised code is compared with."""

import math
from collections import Counter, defaultdict


def mean(values):
    return sum(values) / len(values)


def advantages(name, rewards, groups, ddof=1):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(mine)) == 1:
            out.append(0.0)
        elif name == "dr_grpo":
            out.append(reward - mean(mine))
        elif name == "rloo":
            out.append(reward - (sum(mine) - reward) / (len(mine) - 1))
        else:
            variance = sum((r - mean(mine)) ** 2 for r in mine) / (len(mine) - ddof)
            out.append((reward - mean(mine)) / math.sqrt(variance))
    if name == "reinforce_pp":
        centred = advantages("dr_grpo", rewards, groups)
        std = math.sqrt(sum(a * a for a in centred) / max(len(centred) - ddof, 1))
        return [a / std if std else 0.0 for a in centred]
    return out


def alpha(name, row, q=0.2):
    """One completion: `row` maps a signal to the list of its tokens' values."""
    n = len(row["logp"])
    if name == "uniform":
        return [1.0] * n
    if name == "surprisal":
        return [max(0.0, -x) for x in row["logp"]]
    if name == "entropy_reduction":
        h = row["entropy"]
        return [max(0.0, h[t] - h[t + 1]) if t + 1 < n else 0.0 for t in range(n)]
    if name == "divergence":
        return [abs(a - b) for a, b in zip(row["logp"], row["logp_base"], strict=True)]
    if name == "arca":
        return list(row["residual"])
    assert name == "forking"
    threshold = sorted(row["entropy"], reverse=True)[max(1, math.ceil(round(q * n, 9))) - 1]
    return [1.0 if h >= threshold else 0.0 for h in row["entropy"]]


def normalise(alphas, p=1.0):
    s = [(a + 1e-8) ** p for a in alphas]
    if sum(s) <= 1e-8:
        return [1.0] * len(s)
    return [len(s) * x / sum(s) for x in s]


def ranks(values):
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


def gcpo(row, divergence="k3", normaliser="rank_power"):
    eta = []
    for t in range(len(row["logp"])):
        gain = row["logp"][t] - row["logp_negative"][t]
        d = min(max(-gain, -20.0), 20.0)
        eta.append(
            {
                "k3": min(math.exp(d) - d - 1, 10.0),
                "kl": row["kl_negative"][t],
                "information_gain": max(0.0, gain),
                "abs": abs(gain),
            }[divergence]
        )
    n = len(eta)
    if len(set(eta)) == 1:
        return [1.0] * n
    if normaliser == "cdf":
        return [sum(e < x for e in eta) / n for x in eta]
    if normaliser == "softmax":
        w = [math.exp(x - max(eta)) for x in eta]
    elif normaliser == "minmax":
        w = [(x - min(eta)) / (max(eta) - min(eta)) for x in eta]
    else:
        power = math.log(0.2) / math.log(0.6) - 1
        w = [(rank / n) ** power for rank in ranks(eta)]
    return [n * x / sum(w) for x in w]


def eapo(entropies, advantages, groups, strength=0.2, phi=2.0, multiplicative=False):
    """Rows of token advantages A_{i,t}."""
    out = []
    for h_row, a, group in zip(entropies, advantages, groups, strict=True):
        pool = [h for row, g in zip(entropies, groups, strict=True) if g == group for h in row]
        mu = mean(pool)
        sigma = math.sqrt(mean([(h - mu) ** 2 for h in pool]))
        row = []
        for h in h_row:
            z = (h - mu) / sigma if sigma else 0.0
            if multiplicative:
                row.append(a * (1 + strength / phi * min(max(z, -1), 1)))
            else:
                bonus = min(max(z, -abs(a) / phi), abs(a) / phi)
                row.append(a + strength * (a > 0) * bonus - strength * (a < 0) * bonus)
        out.append(row)
    return out


def delta(features, advantages):
    """features[i][t]: list of H numbers. Squared distances to the centroids, as the paper writes them."""
    tokens = [(i, t) for i, row in enumerate(features) for t in range(len(row))]
    sides = {side: [k for k in tokens if advantages[k[0]] * side > 0] for side in (1, -1)}
    q = dict.fromkeys(tokens, 1.0)
    scaled = dict.fromkeys(tokens, 0.0)
    hidden = range(len(features[0][0]))
    for _ in range(2):
        mu = {}
        for side, keys in sides.items():
            mass = sum(q[k] * abs(advantages[k[0]]) for k in keys)
            mu[side] = [
                sum(q[k] * abs(advantages[k[0]]) * features[k[0]][k[1]][h] for k in keys) / mass for h in hidden
            ]
        for side, keys in sides.items():
            margins = []
            for i, t in keys:
                v = features[i][t]
                other = sum((v[h] - mu[-side][h]) ** 2 for h in hidden)
                own = sum((v[h] - mu[side][h]) ** 2 for h in hidden)
                margins.append(other - own)
            gamma = math.sqrt(mean([(m - mean(margins)) ** 2 for m in margins]))
            for k, m in zip(keys, margins, strict=True):
                scaled[k] = m / gamma if gamma > 1e-6 * max(map(abs, margins)) else 0.0
                q[k] = 1 / (1 + math.exp(-scaled[k]))
    lam = {k: 0.8 + (0.4 * q[k] if advantages[k[0]] else 0.0) for k in tokens}
    scale = len(tokens) / sum(lam.values())
    return [[lam[i, t] * scale for t in range(len(row))] for i, row in enumerate(features)]


def levenshtein(a, b):
    """The recursion of the definition, by its table."""
    d = [[i + j if i * j == 0 else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            d[i][j] = min(d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
    return d[-1][-1]


def gini(weights):
    """Mean absolute difference over twice the mean."""
    n = len(weights)
    return sum(abs(x - y) for x in weights for y in weights) / (2 * n * sum(weights))


def effective_token_ratio(weights):
    w = [x / sum(weights) for x in weights]
    return 1 / (len(w) * sum(x * x for x in w))


def pearson(a, b):
    da, db = [x - mean(a) for x in a], [x - mean(b) for x in b]
    scale = math.sqrt(sum(x * x for x in da) * sum(x * x for x in db))
    return sum(x * y for x, y in zip(da, db, strict=True)) / scale if scale else None


def spearman(rows_a, rows_b):
    found = [pearson(ranks(a), ranks(b)) for a, b in zip(rows_a, rows_b, strict=True)]
    found = [r for r in found if r is not None]
    return mean(found) if found else 0.0


def cancellation_residue(coefficients, completions, groups):
    """Completions as lists of tokens after a common prompt."""
    net = gross = 0.0
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        if len(members) == 1:
            continue
        for t in range(min(len(completions[i]) for i in members)):
            if len({completions[i][t] for i in members}) > 1:
                break
            net += abs(sum(coefficients[i][t] for i in members))
            gross += sum(abs(coefficients[i][t]) for i in members)
    return net / gross if gross else 0.0


def sign_flip_rate(contrast, completions, correct):
    seen = {True: defaultdict(list), False: defaultdict(list)}
    for row, tokens, right in zip(contrast, completions, correct, strict=True):
        for x, token in zip(row, tokens, strict=True):
            seen[right][token].append(x)
    both = set(seen[True]) & set(seen[False])
    return mean([mean(seen[True][v]) * mean(seen[False][v]) < 0 for v in both]) if both else 0.0


def template_share(weights, completions):
    count = Counter(token for tokens in completions for token in tokens)
    frequent = sorted(count, key=lambda token: (-count[token], token))[:20]
    return mean(
        [
            sum(w for w, token in zip(row, tokens, strict=True) if token in frequent) / sum(row)
            for row, tokens in zip(weights, completions, strict=True)
        ]
    )
