// The values of an array as bars, with their axes.

import { ruled } from "../charts.js";
import { h, replace, svg } from "../dom.js";
import { count, number, short } from "../format.js";
import { ticks } from "../scales.js";
import { heading, table } from "./tables.js";

const HEIGHT = 220;
const LEFT = 52;
const RIGHT = 14;
const TOP = 10;
const BOTTOM = 40;

/** A histogram; counts may be drawn by their logarithm. */
export class HistogramView {
  /**
   * @param {{edges: number[], counts: number[]}} data
   * @param {string} label What it is of, for screen readers.
   * @param {boolean} log
   */
  constructor(data, label, log) {
    Object.assign(this, { data, label, log });
    this.chart = svg("svg", { class: "histogram", role: "img", height: HEIGHT, test: "histogram" });
    this.frame = h("div", { class: "histogram-frame" }, this.chart);
    this.readout = h("p", { class: "readout", test: "histogram-readout" });
    this.element = h("div", null, this.frame, this.readout, binTable(data));
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.say(null));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.frame);
    this.say(null);
  }

  setLog(log) {
    this.log = log;
    this.draw();
  }

  close() {
    this.observer.disconnect();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (width === 0) return;
    const { edges, counts } = this.data;
    const [low, high] = [edges[0], edges.at(-1)];
    const highest = Math.max(1, ...counts);
    this.xOf = (value) => LEFT + ((value - low) / (high - low)) * (width - LEFT - RIGHT);
    const turn = this.log ? (size) => Math.log10(size + 1) : (size) => size;
    const yOf = (size) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - turn(size) / turn(highest));
    const sizes = this.log ? powers(highest) : ticks(0, highest, 5).filter(Number.isInteger);
    this.chart.setAttribute("width", width);
    this.chart.setAttribute("aria-label", `${this.label}: ${this.summary()}`);
    replace(
      this.chart,
      sizes.map((size) => ruled(LEFT, width - RIGHT, yOf(size), short(size))),
      counts.map((size, index) => this.bar(index, size, yOf)),
      low < 0 && high > 0 ? svg("line", { class: "zero", x1: this.xOf(0), x2: this.xOf(0), y1: TOP, y2: yOf(0) }) : null,
      this.valueTicks(width),
      axisName({ x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6 }, this.log ? "value (logarithmic counts)" : "value"),
      axisName({ x: -(HEIGHT - BOTTOM) / 2, y: 11, transform: "rotate(-90)" }, "elements"),
    );
  }

  valueTicks(width) {
    const { edges } = this.data;
    const [low, high] = [edges[0], edges.at(-1)];
    const values = edges.length === 2 ? [low] : ticks(low, high, Math.max(2, Math.floor(width / 110)));
    const step = values.length > 1 ? values[1] - values[0] : high - low;
    const largest = Math.max(Math.abs(low), Math.abs(high));
    const digits = Math.min(12, Math.max(3, Math.ceil(Math.log10(largest / step)) + 1));
    return values.map((value) => {
      // A multiple of a step may come out as 1e-17 where it is zero.
      const text = number(Math.abs(value) < step * 1e-6 ? 0 : value, digits);
      return svg("text", { class: "tick", x: this.xOf(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, text);
    });
  }

  bar(index, size, yOf) {
    const x = this.xOf(this.data.edges[index]);
    const next = this.xOf(this.data.edges[index + 1]);
    // What is there is seen: a bar is never less than a pixel high.
    const y = size === 0 ? yOf(0) : Math.min(yOf(size), yOf(0) - 1);
    return svg("rect", { class: "bin", x, y, width: Math.max(0.5, next - x - 1), height: yOf(0) - y });
  }

  summary() {
    const { edges, counts } = this.data;
    const top = counts.indexOf(Math.max(...counts));
    const range = (low, high) => `from ${number(low)} to ${number(high)}`;
    const most = range(edges[top], edges[top + 1]);
    return `${counts.length} bins ${range(edges[0], edges.at(-1))}, most elements ${most}`;
  }

  point(event) {
    const x = event.clientX - this.frame.getBoundingClientRect().left;
    const index = this.data.edges.findLastIndex((edge) => x >= this.xOf(edge));
    this.say(index < 0 || index >= this.data.counts.length ? null : index);
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
  const found = [0];
  const factor = highest > 1e6 ? 100 : 10;
  for (let power = factor; power <= highest; power *= factor) found.push(power);
  return found;
}

function axisName(place, text) {
  return svg("text", { class: "axis-name", "text-anchor": "middle", ...place }, text);
}
