"""The report of a profile: data of a model's modules, and its text. In the order of DeepSpeed's report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .operations import Operations

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, kw_only=True)
class ModuleProfile:
    """One module of a model, with all in it."""

    name: str
    kind: str
    """Its class."""
    details: str
    """What its class says of it, as "in_features=8, out_features=8"."""
    parameters: int
    forward: int
    """Floating-point operations of its forwards."""
    forward_s: float
    children: tuple[ModuleProfile, ...]

    def by_depth(self) -> Iterator[list[ModuleProfile]]:
        """Return the modules of each depth, from 0, this one."""
        row = [self]
        while row:
            yield row
            row = [child for one in row for child in one.children]


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What was measured of a model on one rank."""

    step: int
    world_size: int
    micro_batch_size: int | None
    """None: no engine ran it."""
    operations: Operations
    repeated_forwards: float
    """Forwards that a backward repeats, where none was seen."""
    forward_s: float
    backward_s: float
    step_s: float
    root: ModuleProfile
    notes: tuple[str, ...] = ()
    """What the profile cannot see."""

    @property
    def backward(self) -> int:
        """Operations of the backward; where none was seen, twice the forward's."""
        return self.operations.backward or 2 * self.operations.forward

    @property
    def recomputed(self) -> int:
        """Operations of forwards that the backward repeated; where none was seen, by the factor."""
        seen = self.operations
        return seen.recomputed if seen.backward else int(self.repeated_forwards * seen.forward)


def rate_text(number: float, unit: str) -> str:
    """Return a number in units of thousands, as "1.05 GFLOPS"."""
    for scale, prefix in _SCALES:
        if number >= scale:
            return f"{number / scale:.2f} {prefix}{unit}".rstrip()
    return f"{number:.0f} {unit}".rstrip()


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def profile_text(profile: ModelProfile, *, depth: int, top: int, detailed: bool) -> str:
    """Return the whole report; `depth` -1 is all."""
    parts = [f"Profile of step {profile.step}, one micro-batch of rank 0", _totals_text(profile)]
    if profile.notes:
        parts.append("\n".join(f"Note: {note}" for note in profile.notes))
    parts.append(
        f"Classes of modules with most at each depth (top {top})\n" + summary_text(profile.root, depth=depth, top=top)
    )
    if detailed:
        explained = (
            "Each module: parameters, share of all parameters, multiply-accumulates, share of all, latency of the forward, "
            "share of it, operations per second. Work that no module of its own does is its parent's."
        )
        parts.append(f"{explained}\n" + "\n".join(_module_lines(profile.root, profile.root, depth)))
    return "\n\n".join(parts)


def _totals_text(profile: ModelProfile) -> str:
    seen = profile.operations
    forward, backward = seen.forward, profile.backward + profile.recomputed
    rows = [("world size", str(profile.world_size))]
    if profile.micro_batch_size is not None:
        rows.append(("micro-batch of a rank", str(profile.micro_batch_size)))
    rows += [
        ("parameters of the model", rate_text(profile.root.parameters, "")),
        ("multiply-accumulates of the forward", rate_text(forward // 2, "MACs")),
        ("operations of the forward", rate_text(forward, "FLOPs")),
    ]
    if seen.backward or profile.backward_s:
        how = "" if seen.backward else " (not seen: twice the forward)"
        rows.append(("operations of the backward", rate_text(profile.backward, "FLOPs") + how))
    if profile.recomputed:
        rows.append(("operations of repeated forwards", rate_text(profile.recomputed, "FLOPs")))
    rows.append(("latency of the forward", _seconds_text(profile.forward_s)))
    if profile.forward_s:
        rows.append(("rate of the forward", rate_text(forward / profile.forward_s, "FLOPS")))
    if profile.backward_s:
        both_s = profile.forward_s + profile.backward_s
        rows += [
            ("latency of the backward", _seconds_text(profile.backward_s)),
            ("rate of the backward", rate_text(backward / profile.backward_s, "FLOPS")),
            ("rate of both", rate_text((forward + backward) / both_s, "FLOPS")),
        ]
    if profile.step_s:
        rows.append(("latency of the update", _seconds_text(profile.step_s)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def summary_text(root: ModuleProfile, *, depth: int, top: int) -> str:
    """Return, for each depth, the `top` classes with most parameters, operations and latency."""
    lines = []
    for level, modules in enumerate(root.by_depth()):
        if 0 <= depth < level:
            break
        sums: dict[str, list[float]] = {}
        for one in modules:
            mine = sums.setdefault(one.kind, [0.0, 0.0, 0.0])
            for place, value in enumerate((one.parameters, one.forward // 2, one.forward_s)):
                mine[place] += value
        found = []
        for place, unit in enumerate(("", "MACs", "s")):
            most = sorted(sums.items(), key=lambda kind: -kind[1][place])[:top]
            texts = (
                f"{kind} {_seconds_text(values[2]) if unit == 's' else rate_text(values[place], unit)}"
                for kind, values in most
            )
            found.append(", ".join(texts))
        lines.append(f"depth {level}: parameters: {found[0]}; operations: {found[1]}; forward: {found[2]}")
    return "\n".join(lines)


def _module_lines(one: ModuleProfile, root: ModuleProfile, depth: int, level: int = 0) -> Iterator[str]:
    rate = rate_text(one.forward / one.forward_s, "FLOPS") if one.forward_s else "0 FLOPS"
    numbers = ", ".join(
        (
            rate_text(one.parameters, ""),
            _share(one.parameters, root.parameters),
            rate_text(one.forward // 2, "MACs"),
            _share(one.forward, root.forward),
            _seconds_text(one.forward_s),
            _share(one.forward_s, root.forward_s),
            rate,
        )
    )
    details = f", {one.details}" if one.details and "\n" not in one.details else ""
    name = one.kind if level == 0 else f"({one.name}): {one.kind}"
    yield f"{'  ' * level}{name}({numbers}{details})"
    if depth < 0 or level < depth:
        for child in one.children:
            yield from _module_lines(child, root, depth, level + 1)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"
