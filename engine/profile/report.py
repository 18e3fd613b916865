"""The report of a profile: data of a model's modules, and its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
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
    """Forwards that a backward repeats, if none was seen."""
    seconds: Mapping[str, float]
    """Of "forward", "backward" and "step"."""
    root: ModuleProfile
    compiled: tuple[str, ...] = ()
    """Modules whose calls are compiled: what is in them was not seen."""

    @property
    def recomputed(self) -> int:
        """Operations of forwards that the backward repeated; if none was seen, by the factor."""
        seen = self.operations
        return seen.recomputed if seen.backward else int(self.repeated_forwards * seen.forward)


def rate_text(number: float, unit: str) -> str:
    """Return a number in units of thousands, as "1.05 GFLOPS"."""
    for scale, prefix in _SCALES:
        if number >= scale:
            return f"{number / scale:.2f} {prefix}{unit}".rstrip()
    return f"{number:.0f} {unit}".rstrip()


def profile_text(profile: ModelProfile, *, depth: int, top: int, detailed: bool) -> str:
    """Return the whole report; `depth` -1 is all."""
    parts = [f"Profile of step {profile.step}, one micro-batch of rank 0", _totals_text(profile)]
    if profile.compiled:
        parts.append(
            f"Note: {', '.join(profile.compiled[:3])}: compiled; modules within are not seen one by one, and of operations "
            "those that torch.compile leaves to libraries alone. Profile without engine.compile() to see all"
        )
    parts.append(
        f"Classes of modules with most at each depth (top {top})\n" + summary_text(profile.root, depth=depth, top=top)
    )
    if detailed:
        explained = (
            "Each module: parameters, share of all parameters, multiply-accumulates of the forward, share of all."
        )
        parts.append(f"{explained}\n" + "\n".join(_module_lines(profile.root, profile.root, depth)))
    return "\n\n".join(parts)


def _totals_text(profile: ModelProfile) -> str:
    seen = profile.operations
    rows = {
        "world size": str(profile.world_size),
        "micro-batch of a rank": str(profile.micro_batch_size or ""),
        "parameters of the model": rate_text(profile.root.parameters, ""),
        "multiply-accumulates of the forward": rate_text(seen.forward // 2, "MACs"),
        "operations of the forward": rate_text(seen.forward, "FLOPs"),
        "operations of the backward": rate_text(seen.backward, "FLOPs") if seen.backward else "",
        "operations of repeated forwards": rate_text(profile.recomputed, "FLOPs") if profile.recomputed else "",
    }
    for part, name in (("forward", "the forward"), ("backward", "the backward"), ("step", "the update")):
        if seconds := profile.seconds.get(part):
            rows[f"latency of {name}"] = f"{seconds * 1e3:.2f} ms"
            count = {"forward": seen.forward, "backward": seen.backward + seen.recomputed}.get(part)
            rows[f"rate of {name}"] = rate_text(count / seconds, "FLOPS") if count else ""
    return "\n".join(f"{name:<36} {text}" for name, text in rows.items() if text)


def summary_text(root: ModuleProfile, *, depth: int, top: int) -> str:
    """Return the classes of modules that have most parameters and operations at each depth."""
    lines = []
    for level, modules in enumerate(root.by_depth()):
        if 0 <= depth < level:
            break
        numel: Counter[str] = Counter()
        macs: Counter[str] = Counter()
        for one in modules:
            numel[one.kind] += one.parameters
            macs[one.kind] += one.forward // 2
        found = [
            ", ".join(f"{kind} {rate_text(count, unit)}" for kind, count in most.most_common(top))
            for most, unit in ((numel, ""), (macs, "MACs"))
        ]
        lines.append(f"depth {level}: parameters: {found[0]}; operations: {found[1]}")
    return "\n".join(lines)


def _module_lines(one: ModuleProfile, root: ModuleProfile, depth: int, level: int = 0) -> Iterator[str]:
    numbers = (
        f"{rate_text(one.parameters, '')}, {_share(one.parameters, root.parameters)}, "
        f"{rate_text(one.forward // 2, 'MACs')}, {_share(one.forward, root.forward)}"
    )
    details = f", {one.details}" if one.details and "\n" not in one.details else ""
    yield f"{'  ' * level}{f'({one.name}): ' if level else ''}{one.kind}({numbers}{details})"
    if depth < 0 or level < depth:
        for child in one.children:
            yield from _module_lines(child, root, depth, level + 1)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"
