// Where every byte of a run rests: the map of tiers, kinds and arrays, the arrays as a list, and the plan beside what was measured.

import { api, get } from "../data.js";
import { h, replace, titled } from "../dom.js";
import { bytes, count, counted } from "../format.js";
import { filterField, filterText, fits } from "../parts/filter.js";
import { Grid } from "../parts/grid.js";
import { colours, treeOf } from "../parts/placement.js";
import { planPanel } from "../parts/planbars.js";
import { Treemap } from "../parts/treemap.js";
import { empty } from "../states.js";
import { inColour } from "../themes.js";

const NAME = { key: "name", label: "Array", width: "minmax(13rem, 1fr)", stays: true, cell: (array) => nameOf(array), value: (array) => array.name };
const KIND = { key: "kind", label: "Kind", width: "8.5rem", cell: (array) => array.kind, value: (array) => array.kind };
const TIER = { key: "tier", label: "Tier", width: "4rem", cell: (array) => array.tier, value: (array) => array.tier };
const SIZE = { key: "nbytes", label: "Size", width: "5.75rem", numeric: true, cell: (array) => bytes(array.nbytes), value: (array) => array.nbytes };

/** Characters of a name that are shown in any case. */
const TAIL = 22;

export async function show(container, params) {
  const placement = await get(api(["runs", params.run, "placement"]));
  if (placement.arrays.length === 0 && placement.parts.length === 0) {
    replace(
      container,
      empty("No memory data", "The run's journal has no memory plan. A run with a zstore engine writes one when it starts. To see a plan before training:", "zstore plan --help"),
    );
    return undefined;
  }
  const view = new MemoryView(placement);
  replace(container, view.element);
  return () => view.close();
}

class MemoryView {
  constructor(placement) {
    this.placement = placement;
    this.columns = matchMedia("(max-width: 640px)").matches ? [NAME, SIZE, KIND, TIER] : [NAME, KIND, TIER, SIZE];
    const kinds = colours(placement);
    const tree = treeOf(placement);
    this.arrays = tree.flatMap((tier) => tier.children.flatMap((kind) => kind.children)).sort((a, b) => b.nbytes - a.nbytes);
    this.keys = new Map(this.arrays.map((array, index) => [array, String(index)]));
    this.map = new Treemap({ tree, colours: kinds, reached: (array) => this.reached(array) });
    this.grid = new Grid({ label: "Arrays", test: "placed-arrays", keyOf: (array) => this.keys.get(array), onActive: (array) => this.map.reach(array, false) });
    this.grid.sort = { key: "nbytes", down: true };
    this.grid.show(this.arrays, this.columns);
    this.shown = h("span", { class: "hint", role: "status" }, counted(this.arrays.length, "array"));
    const field = filterField({ label: "Filter arrays", placeholder: "Filter by name, kind or tier" }, (text) => this.filter(text));
    this.element = h(
      "div",
      { class: "view" },
      h(
        "section",
        { class: "panel memory" },
        titled(h("h2", null, "Where bytes rest, on rank 0"), legend(kinds)),
        h("div", { class: "memory-parts" }, this.map.element, h("div", { class: "memory-list" }, h("div", { class: "row" }, field, this.shown), this.grid.element)),
      ),
      planPanel(placement, kinds),
    );
    this.filter(filterText());
  }

  filter(text) {
    const found = this.arrays.filter((array) => fits(`${array.name} ${array.kind} ${array.tier}`, text));
    const kept = new Set(found);
    this.map.filter(text.trim() === "" ? null : (array) => kept.has(array));
    this.grid.show(found, this.columns);
    const size = found.reduce((sum, array) => sum + array.nbytes, 0);
    const number = found.length === this.arrays.length ? count(found.length) : `${count(found.length)} of ${count(this.arrays.length)}`;
    this.shown.textContent = `${number} arrays, ${bytes(size)}`;
  }

  reached(array) {
    if (array !== null && document.activeElement === this.map.plot) this.grid.reveal(this.keys.get(array));
  }

  close() {
    this.map.close();
    this.grid.close();
  }
}

/** Return the name of an array, of which the head is cut where there is no room: names differ at their ends. */
function nameOf({ name }) {
  const cut = Math.max(name.lastIndexOf("/"), name.slice(0, -TAIL).lastIndexOf(".")) + 1;
  return h("span", { class: "placed-name", title: name }, cut === 0 ? null : h("span", null, name.slice(0, cut)), h("span", null, name.slice(cut)));
}

function legend(kinds) {
  return h("div", { class: "legend" }, [...kinds].map(([kind, colour]) => h("span", { class: "key" }, h("i", { class: "swatch", style: inColour(colour) }), kind)));
}
