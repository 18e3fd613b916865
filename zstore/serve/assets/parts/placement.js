// Where the bytes of a run rest, as a tree: tiers, kinds of state, arrays. Pure.

export const TIERS = ["device", "host", "disk"];
const KINDS = ["parameters", "gradients", "optimizer state", "buffers", "activations", "master weights"];

/** Return the tiers that hold something, each with its kinds, and these with their arrays, the largest first. */
export function treeOf(placement) {
  const leaves = placement.arrays.length > 0 ? placement.arrays : placement.parts.map(partAsArray);
  const tiers = new Map();
  for (const leaf of leaves) {
    if (!(leaf.nbytes > 0)) continue;
    if (!tiers.has(leaf.tier)) tiers.set(leaf.tier, new Map());
    const kinds = tiers.get(leaf.tier);
    if (!kinds.has(leaf.kind)) kinds.set(leaf.kind, []);
    kinds.get(leaf.kind).push(leaf);
  }
  return [...tiers].map(([tier, kinds]) => node(tier, [...kinds].map(([kind, arrays]) => kindNode(tier, kind, arrays))));
}

/** Return the kinds of a placement, each with the number of its colour. */
export function colours(placement) {
  const found = new Set([...placement.parts, ...placement.arrays].map((part) => part.kind));
  const order = [...KINDS.filter((kind) => found.has(kind)), ...[...found].filter((kind) => !KINDS.includes(kind)).sort()];
  return new Map(order.map((kind) => [kind, (KINDS.includes(kind) ? KINDS.indexOf(kind) : order.indexOf(kind)) % 8]));
}

/** Return plan and measured bytes by tier: `{tier, budget, planned, measured, parts}`; sums are null where nothing is known. */
export function byTier(placement) {
  const budgets = { host: placement.host_budget_bytes, device: placement.device_bytes };
  return TIERS.map((tier) => {
    const parts = placement.parts.filter((part) => part.tier === tier);
    return { tier, budget: budgets[tier] ?? null, planned: sum(parts, "planned_bytes"), measured: sum(parts, "measured_bytes"), parts };
  }).filter(({ parts, budget }) => parts.length > 0 || budget !== null);
}

function sum(parts, name) {
  const known = parts.map((part) => part[name]).filter((value) => value !== null);
  return known.length === 0 ? null : known.reduce((total, value) => total + value, 0);
}

function partAsArray(part) {
  return { name: `all ${part.kind}`, tier: part.tier, kind: part.kind, nbytes: part.measured_bytes ?? part.planned_bytes ?? 0 };
}

function kindNode(tier, kind, arrays) {
  const sorted = arrays.toSorted((a, b) => b.nbytes - a.nbytes);
  return { name: kind, tier, kind, nbytes: sorted.reduce((total, array) => total + array.nbytes, 0), children: sorted };
}

function node(tier, kinds) {
  const children = kinds.sort((a, b) => b.nbytes - a.nbytes);
  return { name: tier, tier, nbytes: children.reduce((total, kind) => total + kind.nbytes, 0), children };
}
