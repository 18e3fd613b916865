// The values of an array as bars, with their axes.

import { h, replace } from "../dom.js";
import { count, number, short } from "../format.js";
import { BARS, Plot, WHOLE, axis, bars, baseAxis, drawUpright } from "../plot.js";
import { colour } from "../themes.js";
import { heading, table } from "./tables.js";

const HEIGHT = 220;

/** A histogram; counts may be drawn by their logarithm. */
export class HistogramView {
  /**
   * @param {{edges: number[], counts: number[]}} data
   * @param {string} label What it is of, for screen readers.
   * @param {boolean} log
   */
  constructor(data, label, log) {
    Object.assign(this, { data, log });
    this.frame = h("div", { class: "histogram", role: "img", "aria-label": `${label}: ${summary(data)}`, test: "histogram" });
    this.readout = h("p", { class: "readout", test: "histogram-readout" });
    this.element = h("div", null, this.frame, this.readout, binTable(data));
    this.plot = new Plot(this.frame, () => this.options());
    this.say(null);
  }

  setLog(log) {
    this.log = log;
    this.plot.draw();
  }

  close() {
    this.plot.close();
  }

  options() {
    const { edges, counts } = this.data;
    const highest = Math.max(1, ...counts);
    // What is there is seen: a bar is never less than a pixel high.
    const heights = this.log ? counts : counts.map((size) => (size === 0 ? 0 : Math.max(size, highest / 165)));
    const sizes = { range: [0, highest], ...(this.log && { distr: 100, fwd: (size) => Math.log10(size + 1), bwd: (height) => 10 ** height - 1 }) };
    const ticks = this.log ? { splits: powers(highest), filter: (_, values) => values } : { incrs: WHOLE };
    return {
      ...BARS,
      data: [counts.map((_, index) => (edges[index] + edges[index + 1]) / 2), heights],
      height: HEIGHT,
      scales: { x: { time: false, range: [edges[0], edges.at(-1)] }, y: sizes },
      series: [{}, { paths: bars({ size: [1], gap: 1 }), fill: colour("series-0"), width: 0, points: { show: false } }],
      axes: [baseAxis(this.log ? "value (logarithmic counts)" : "value", short), axis("elements", short, ticks)],
      hooks: {
        draw: [(chart) => drawUpright(chart, [{ x: 0, stroke: colour("line-strong"), dash: [3, 3] }])],
        setCursor: [({ cursor }) => this.say(cursor.idx)],
      },
    };
  }

  say(index) {
    const { edges, counts } = this.data;
    replace(
      this.readout,
      index === null
        ? `${counts.length} bins, each ${number(edges[1] - edges[0])} wide`
        : `${number(edges[index])} up to ${number(edges[index + 1])}: ${count(counts[index])} elements`,
    );
  }
}

function summary({ edges, counts }) {
  const top = counts.indexOf(Math.max(...counts));
  const range = (low, high) => `from ${number(low)} to ${number(high)}`;
  return `${counts.length} bins ${range(edges[0], edges.at(-1))}, most elements ${range(edges[top], edges[top + 1])}`;
}

/** Bins as a table, closed at first. */
function binTable({ edges, counts }) {
  const row = (size, index) => {
    const cells = [number(edges[index], 6), number(edges[index + 1], 6), count(size)];
    return h("tr", null, cells.map((text) => h("td", { class: "num" }, text)));
  };
  const heads = ["from", "up to", "elements"].map((text) => heading(text, "num"));
  return h(
    "details",
    { test: "histogram-table" },
    h("summary", null, "Bins as a table"),
    h("div", { class: "scroll" }, table(null, heads, counts.map(row))),
  );
}

function powers(highest) {
  if (highest < 100) return [0, 1, 2, 5, 10, 20, 50].filter((size) => size <= highest);
  const found = [0];
  const factor = highest > 1e6 ? 100 : 10;
  for (let power = factor; power <= highest; power *= factor) found.push(power);
  return found;
}
