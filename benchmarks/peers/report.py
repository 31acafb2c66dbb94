"""The figures of ``benchmarks.layer`` as text for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.output import aligned
from benchmarks.peers.compiled import BOTH, MODES
from benchmarks.peers.limit import KERNELS
from benchmarks.peers.rounds import Spread, ratios, spread

Figures = Mapping[str, Any]
OURS, BASE, AGAIN, FULL = "moe_blocks dropless", "limit", "the same again", "moe_blocks expert 1"
# At most this many times the limit, by dtype, shape and mode.
TARGETS = {
    "float32": {"A": dict(zip(MODES, (1.12, 1.15), strict=True)), "B": dict(zip(MODES, (1.20, 1.25), strict=True))},
    "bfloat16": {name: dict.fromkeys(MODES, 1.3) for name in "AB"},
}
MEMORY = 1.3  # times the limit's temporary bytes, beside the permuted activations


def conditions(where: Figures) -> str:
    """The line that every table depends on."""
    versions = ", ".join(f"{name} {where[name]}" for name in ("python", "jax", "jaxlib", "flax", "numpy"))
    tiny = ", tiny sizes: the times mean nothing" if where["quick"] else ""
    return (
        f"{where['date']}, {where['cores']} cores of {where['platform']} (load {where['load']:.1f}), {versions}, "
        f"{where['dtype']}{tiny}"
    )


def race(found: Figures, where: Figures) -> str:
    """All contestants, who did not come, and the targets."""
    versions = "".join(f", {name} {version}" for name, version in found["versions"].items())
    skipped = [f"{name}: skipped, {why}" for name, why in found["skipped"].items()]
    lines = [f"{found['title']}, balanced routing, {found['rounds']} rounds{versions}", "", *_times(found)]
    return "\n".join((*lines, *skipped, *([] if where["quick"] else _race_targets(found, where))))


def _race_targets(found: Figures, where: Figures) -> list[str]:
    lines = []
    for mode, target in TARGETS[where["dtype"]].get(found["shape"], {}).items():
        lines.append(_target(f"dropless over the limit, {mode}", _ratio(found, OURS, BASE, mode), target))
    again = _ratio(found, AGAIN, OURS, BOTH)
    lines.append(f"the same program again over dropless, {BOTH}: {_told(again)}: the noise")
    lines.append(_target(f"factor 1 over dropless, {BOTH}", _ratio(found, FULL, OURS, BOTH), 1.0))
    return lines


def skew(found: Figures, where: Figures) -> str:
    """The routings, and how unequal each is."""
    unequal = ", ".join(f"{name} {value:.2f}" for name, value in found["imbalance"].items())
    head = f"{found['title']}, {found['rounds']} rounds; largest load over the mean: {unequal}"
    return "\n".join((head, "", *_times(found)))


def scaling(found: Figures, where: Figures) -> str:
    """One table of the scaling, and what should be constant in it."""
    per_row = {
        name: 1e6 * spread([s for s in row["seconds"][BOTH] if s is not None]).median / row["assignments"]
        for name, row in found["rows"].items()
        if row["check"]
    }
    lines = [f"microseconds for one assignment, {BOTH}: " + ", ".join(f"{n} {v:.2f}" for n, v in per_row.items())]
    if net := _without_kernels(found):
        told = ", ".join(f"{name} {ratio.median:.3f}" for name, ratio in net.items())
        lines.append(f"over the limit without what the kernels alone take, {BOTH}: {told}")
    return "\n".join((f"{found['title']}, {found['rounds']} rounds", "", *_times(found), *lines))


def _without_kernels(found: Figures) -> dict[str, Spread]:
    """Round by round, (layer - kernels) / limit: what should not grow with the number of experts."""
    rows = found["rows"]
    net = {}
    for name, row in rows.items():
        if (kernels := rows.get(KERNELS + name)) is not None:
            own, floor = row["seconds"][BOTH], kernels["seconds"][BOTH]
            rest = [a - b for a, b in zip(own, floor, strict=True)]
            net[name] = spread(ratios(rest, rows[row["base"]]["seconds"][BOTH]))
    return net


def memory(found: Figures, where: Figures) -> str:
    """Temporary bytes against their bound, largest array, FLOPs."""
    heads = [
        ["", "", "", "temp MiB", "", "", "", "largest array MiB", "", "GFLOP", "", ""],
        ["T", "E", "k", "layer", "limit", "bound", "", "layer", "limit", "layer", "limit", "needed"],
    ]
    body = []
    for row in found["rows"]:
        shape, layer, limit = row["shape"], row["layer"], row["limit"]
        assignments = shape["tokens"] * shape["k"]
        bound = MEMORY * limit["temp_bytes"] + assignments * shape["width"] * row["itemsize"]
        needed = 18.0 * assignments * shape["width"] * shape["expert_width"]
        body.append(
            [str(shape[name]) for name in ("tokens", "experts", "k")]
            + [f"{size / 2**20:.2f}" for size in (layer["temp_bytes"], limit["temp_bytes"], bound)]
            + ["met" if layer["temp_bytes"] <= bound else "MISSED"]
            + [f"{size / 2**20:.2f}" for size in (layer["largest_bytes"], limit["largest_bytes"])]
            + [f"{count / 1e9:.3f}" for count in (layer["flops"], limit["flops"], needed)]
        )
    bound = f"bound: {MEMORY} x limit + T*k*D permuted activations"
    head = f"{found['title']}, {BOTH} as XLA tells it; {bound}; it counts a loop's body once"
    return "\n".join((head, "", *aligned(heads, body, names=3)))


RENDER: dict[str, Callable[[Figures, Figures], str]] = {
    "race": race,
    "skew": skew,
    "scaling": scaling,
    "memory": memory,
}


def _times(found: Figures) -> list[str]:
    heads = [
        ["", "", "forward", "", "", "forward+", "backward", "", "difference", "", ""],
        ["", *("ms", "x limit", "quartiles") * 2, "rounds", "output", "gradients", "dropped"],
    ]
    body = []
    for name, row in found["rows"].items():
        cells = [name]
        for mode in MODES:
            ratio = _ratio(found, name, row["base"], mode)
            times = spread([s for s in row["seconds"][mode] if s is not None])
            cells += [f"{1e3 * times.median:.2f}", f"{ratio.median:.3f}", f"{ratio.lower:.3f}-{ratio.upper:.3f}"]
        if checked := row["check"]:
            told = [f"{checked['output']:.1e}", f"{checked['gradients']:.1e}", f"{checked['dropped']:.1%}"]
        else:
            told = ["-"] * 3
        body.append([*cells, str(ratio.rounds), *told])
    return aligned(heads, body)


def _ratio(found: Figures, name: str, base: str, mode: str) -> Spread:
    rows = found["rows"]
    return spread(ratios(rows[name]["seconds"][mode], rows[base]["seconds"][mode]))


def _told(ratio: Spread) -> str:
    return f"{ratio.median:.3f} (quartiles {ratio.lower:.3f} to {ratio.upper:.3f}, {ratio.rounds} rounds)"


def _target(what: str, ratio: Spread, target: float) -> str:
    missed = "within the noise" if ratio.lower <= target else "MISSED"
    return f"{what}: {_told(ratio)}; target {target:g}: {'met' if ratio.median <= target else missed}"
