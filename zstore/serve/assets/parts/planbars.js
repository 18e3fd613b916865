// The plan beside what was measured: a bar of each for every kind of state, by tier, all on one scale.

import { h } from "../dom.js";
import { NOTHING, bytes, percent } from "../format.js";
import { inColour } from "../themes.js";
import { byTier } from "./placement.js";

/** Return the panel of a placement; `colours` are the numbers of colours by kind. */
export function planPanel(placement, colours) {
  const tiers = byTier(placement);
  const most = Math.max(1, ...tiers.flatMap(({ parts }) => parts.flatMap((part) => [part.planned_bytes ?? 0, part.measured_bytes ?? 0])));
  return h(
    "section",
    { class: "panel", test: "plan" },
    h("div", { class: "row" }, h("h2", null, "Plan and measured"), h("span", { class: "spring" }), h("div", { class: "legend" }, h("span", { class: "key" }, h("i", { class: "swatch planned" }), "planned"), h("span", { class: "key" }, h("i", { class: "swatch", style: inColour(7) }), "measured"))),
    h("div", { class: "plan" }, tiers.map((tier) => tierBlock(tier, most, colours))),
  );
}

function tierBlock({ tier, budget, planned, measured, parts }, most, colours) {
  const used = measured ?? planned;
  return h(
    "section",
    { class: "plan-tier", "aria-label": tier },
    h("h3", null, tier),
    h(
      "p",
      { class: "hint" },
      `planned ${bytes(planned)}, measured ${bytes(measured)}`,
      budget === null ? null : [`, ${tier === "host" ? "budget" : "memory"} ${bytes(budget)}`, used === null ? null : h("span", { class: used > budget ? "bad" : null }, ` (${percent(used / budget)} used)`)],
    ),
    budget === null || used === null
      ? null
      : h("meter", { class: "budget", min: "0", max: budget, value: used, "aria-label": `${tier}: ${bytes(used)} of ${bytes(budget)}` }),
    h("div", { class: "plan-rows", role: "table", "aria-label": `Kinds of state on ${tier}` }, parts.map((part) => row(part, most, colours))),
  );
}

function row(part, most, colours) {
  const bar = (value, kind) =>
    h("div", { class: kind, style: { width: `${value === null ? 0 : Math.max(0.3, (value / most) * 100)}%` } });
  const off = part.planned_bytes ? (part.measured_bytes - part.planned_bytes) / part.planned_bytes : null;
  const known = off !== null && part.measured_bytes !== null;
  return h(
    "div",
    { class: "plan-row", role: "row" },
    h("span", { class: "name", role: "rowheader" }, part.kind),
    h("span", { class: "num", role: "cell" }, part.planned_bytes === null ? h("span", { class: "muted" }, "not planned") : bytes(part.planned_bytes)),
    h("span", { class: "num", role: "cell" }, part.measured_bytes === null ? h("span", { class: "muted" }, "not measured") : bytes(part.measured_bytes)),
    h("span", { class: "num muted", role: "cell" }, known ? `${off > 0 ? "+" : ""}${percent(off)}` : NOTHING),
    h("div", { class: "bars", style: inColour(colours.get(part.kind) ?? 0), "aria-hidden": "true" }, bar(part.planned_bytes, "planned"), bar(part.measured_bytes, "measured")),
  );
}
