// Curves over steps, as SVG: several charts move together, are read by pointer or keyboard, and have a table beside them.

import { atFrame, h, replace, svg } from "./dom.js";
import { NOTHING, count, number, short } from "./format.js";
import { extent, firstFrom, labels, nearest, scale } from "./scales.js";

const HEIGHT = 206;
const MARGIN = { top: 10, right: 12, bottom: 38, left: 74 };
const TABLE_ROWS = 100;
const DRAG_PX = 5;
const SMOOTH_POINTS = 20;
const HELP =
  "Arrow keys read the points, with Shift they select a range, Enter zooms to it, plus and minus zoom, Escape shows everything.";

/**
 * Charts that share the range of x and the point that is read.
 * @param {(domain: [number, number] | null) => void} changed is called when people choose another range
 */
export function chartGroup(changed = () => {}) {
  const charts = new Set();
  return {
    charts,
    domain: null,
    cursor: null,
    brush: null,
    setDomain(domain, quietly = false) {
      this.domain = domain;
      this.brush = null;
      for (const chart of charts) chart.draw();
      if (!quietly) changed(domain);
    },
    setCursor(x) {
      this.cursor = x;
      for (const chart of charts) chart.read();
    },
    setBrush(range) {
      this.brush = range;
      for (const chart of charts) chart.read();
    },
  };
}

/**
 * A chart. Returns `{element, update, close, draw}`; `update({x, series, levels, marks})` takes ascending `x` and
 * - series: `{label, values, low, high, joins}`: a value, and the ends of its band, for each x; null leaves a gap, unless it joins
 * - levels: `{label, value}`: horizontal lines
 * - marks: `{x, label, kind}`: `resume` and `wrong` are vertical lines, `save` a tick at the axis
 */
export class LineChart {
  constructor({ title, name, format = number, axis = short, unit = "", group = chartGroup(), zero = false, stacked = false, note = "" }) {
    Object.assign(this, { title, format, axis, unit: unit || title.toLowerCase(), group, zero, stacked, log: false, smooth: false });
    this.data = { x: [], series: [], levels: [], marks: [] };
    this.width = 0;
    this.draw = atFrame(() => this.drawNow());
    this.anchor = null;
    this.layers = {
      grid: svg("g", { class: "grid" }),
      bands: svg("g"),
      lines: svg("g"),
      marks: svg("g"),
      brush: svg("rect", { class: "brush", y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom }),
      cursor: svg("g", { class: "cursor" }),
    };
    this.canvas = svg("svg", { height: HEIGHT, "aria-hidden": "true", focusable: "false" }, Object.values(this.layers));
    this.plot = h("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": title, "aria-description": HELP }, this.canvas);
    this.legend = h("div", { class: "legend" });
    this.table = h("details", { class: "as-table", ontoggle: () => this.fillTable() }, h("summary", null, "Table"));
    this.element = h(
      "figure",
      { class: `panel chart${stacked ? " stacked" : ""}`, test: `chart-${name}` },
      h("figcaption", null, h("h3", null, title, note ? h("span", { class: "hint" }, ` ${note}`) : null), this.legend),
      this.plot,
      this.table,
    );
    this.listen();
    group.charts.add(this);
  }

  update(data) {
    const same = this.data.series.map((one) => one.label).join("\n") === data.series.map((one) => one.label).join("\n");
    this.data = { levels: [], marks: [], ...data };
    if (!same || this.legend.childElementCount === 0) this.makeLegend();
    this.plot.setAttribute("aria-label", this.summary());
    this.draw();
  }

  /** Say in words what the curves do, for those who do not see them. */
  summary() {
    const { x, series } = this.data;
    if (x.length === 0) return this.title;
    const parts = series.map((one) => {
      const range = extent([one.values], 0, x.length);
      return range === null ? `${one.label} not known` : `${one.label} from ${this.format(range[0])} to ${this.format(range[1])}`;
    });
    return `${this.title} by step, steps ${count(x[0])} to ${count(x[x.length - 1])}: ${parts.join(", ")}`;
  }

  setLog(log) {
    this.log = log;
    this.draw();
  }

  setSmooth(smooth) {
    this.smooth = smooth;
    this.draw();
  }

  close() {
    this.group.charts.delete(this);
    this.observer.disconnect();
  }

  drawNow() {
    if (this.width === 0) return;
    const { x, levels } = this.data;
    const domain = this.group.domain ?? [x[0] ?? 0, x[x.length - 1] ?? 1];
    const first = Math.max(0, firstFrom(x, domain[0]) - 1);
    const last = Math.min(x.length, firstFrom(x, domain[1]) + 1);
    this.shown = { first, last, rows: this.stacked ? stack(this.data.series) : this.data.series };
    const lists = this.shown.rows.flatMap((row) => [row.values, row.low, row.high].filter(Boolean));
    let range = extent(lists, first, last, { positive: this.log }) ?? [0, 1];
    const extra = levels.map((level) => level.value).concat(this.zero && !this.log ? [0] : []);
    range = [Math.min(range[0], ...extra), Math.max(range[1], ...extra)];
    const margin = this.log ? 0 : (range[1] - range[0]) * 0.05;
    const low = this.zero && range[0] >= 0 ? range[0] : range[0] - margin;
    this.x = scale(domain[0], domain[1], MARGIN.left, this.width - MARGIN.right, { wanted: this.width / 110 });
    this.y = scale(low, range[1] + margin, HEIGHT - MARGIN.bottom, MARGIN.top, { log: this.log, wanted: 5 });
    this.drawAxes();
    this.drawSeries();
    this.drawMarks();
    this.read();
    this.fillTable();
  }

  drawAxes() {
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const whole = this.x.ticks.filter(Number.isInteger);
    const [texts, steps] = [labels(this.y.ticks, this.axis), labels(whole, short)];
    const middle = (MARGIN.top + bottom) / 2;
    replace(
      this.layers.grid,
      this.y.ticks.map((value, index) => ruled(MARGIN.left, right, this.y.to(value), texts[index])),
      whole.map((value, index) => svg("text", { x: this.x.to(value), y: bottom + 16, "text-anchor": "middle" }, steps[index])),
      svg("text", { class: "unit", x: (MARGIN.left + right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "step"),
      svg("text", { class: "unit", x: 10, y: middle, transform: `rotate(-90 10 ${middle})`, "text-anchor": "middle" }, this.unit),
      svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }),
    );
  }

  drawSeries() {
    const { first, last, rows } = this.shown;
    const { x } = this.data;
    const px = (index) => this.x.to(x[index]).toFixed(1);
    const py = (value) => this.y.to(value).toFixed(1);
    const shown = (value) => value !== null && value !== undefined && (!this.y.log || value > 0);
    replace(
      this.layers.bands,
      rows.map((row, color) => {
        if (!row.low || !row.high) return null;
        return svg("path", { class: `band c${color % 8}`, d: band(row, first, last, { px, py, shown }) });
      }),
    );
    replace(
      this.layers.lines,
      rows.map((row, color) => {
        const path = (values, kind = "") => svg("path", { class: `line c${color % 8}${kind}`, d: line(values, first, last, { px, py, shown, joins: row.joins }) });
        return this.smooth && !this.stacked ? [path(row.values, " raw"), path(smoothed(row.values))] : path(row.values);
      }),
    );
  }

  drawMarks() {
    const { levels, marks } = this.data;
    const right = this.width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const inside = marks.filter((mark) => mark.x >= this.x.low && mark.x <= this.x.high);
    replace(
      this.layers.marks,
      levels.map((level, index) => {
        const y = this.y.to(level.value);
        const left = index % 2 === 1; // Two that are close do not write over each other.
        return [
          svg("line", { class: "level", x1: MARGIN.left, x2: right, y1: y, y2: y }),
          svg(
            "text",
            { class: "level", x: left ? MARGIN.left + 4 : right, y: y + (y < MARGIN.top + 16 ? 14 : -5), "text-anchor": left ? "start" : "end" },
            level.label,
          ),
        ];
      }),
      inside.map((mark) => {
        const at = this.x.to(mark.x);
        const top = mark.kind === "save" ? bottom - 6 : MARGIN.top;
        return svg("line", { class: mark.kind, x1: at, x2: at, y1: top, y2: bottom }, svg("title", null, mark.label));
      }),
    );
  }

  /** Show the values at the point that is read, the last ones that are shown without it. */
  read() {
    if (!this.shown) return;
    const { x, series, marks } = this.data;
    const { cursor, brush } = this.group;
    const at = cursor === null ? firstFrom(x, this.x.high + Number.EPSILON * this.x.high) - 1 : nearest(x, cursor);
    for (const [index, one] of series.entries()) {
      this.values[index].textContent = at < 0 ? NOTHING : this.format(one.values[at]);
    }
    this.stepText.textContent = at < 0 ? NOTHING : count(x[at]);
    const near = cursor === null ? [] : marks.filter((mark) => mark.x === x[at]);
    const spoken = series.map((one, index) => `${one.label} ${this.values[index].textContent}`).join(", ");
    this.plot.setAttribute("aria-valuemin", x[0] ?? 0);
    this.plot.setAttribute("aria-valuemax", x[x.length - 1] ?? 0);
    this.plot.setAttribute("aria-valuenow", x[at] ?? 0);
    this.plot.setAttribute("aria-valuetext", `step ${this.stepText.textContent}: ${[spoken, ...near.map((mark) => mark.label)].join(", ")}`);
    this.drawCursor(cursor === null ? -1 : at);
    const range = brush ?? [0, 0];
    const [from, to] = [Math.min(...range), Math.max(...range)].map((value) => this.clamp(this.x.to(value)));
    this.layers.brush.setAttribute("x", from);
    this.layers.brush.setAttribute("width", brush === null ? 0 : Math.max(1, to - from));
  }

  drawCursor(at) {
    const x = this.data.x[at];
    if (x === undefined || x < this.x.low || x > this.x.high) {
      replace(this.layers.cursor);
      return;
    }
    const place = this.x.to(x);
    replace(
      this.layers.cursor,
      svg("line", { x1: place, x2: place, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
      this.shown.rows.map((row, color) => {
        const value = row.values[at];
        if (value === null || value === undefined || (this.y.log && value <= 0)) return null;
        return svg("circle", { class: `dot c${color % 8}`, cx: place, cy: this.y.to(value), r: 3.5 });
      }),
    );
  }

  makeLegend() {
    this.stepText = h("output", null, NOTHING);
    this.values = this.data.series.map(() => h("output", null, NOTHING));
    replace(
      this.legend,
      h("span", { class: "key" }, "step ", this.stepText),
      this.data.series.map((one, index) =>
        h("span", { class: "key" }, h("i", { class: `swatch c${index % 8}` }), `${one.label} `, this.values[index]),
      ),
    );
  }

  /** Fill the table, where it is open, with some of the points that are shown. */
  fillTable() {
    if (!this.table.open || !this.shown) return;
    const { x, series } = this.data;
    const { first, last } = this.shown;
    const every = Math.max(1, Math.ceil((last - first) / TABLE_ROWS));
    const rows = [];
    for (let index = last - 1; index >= first; index -= every) {
      rows.push(h("tr", null, h("td", { class: "num" }, count(x[index])), series.map((one) => h("td", { class: "num" }, this.format(one.values[index])))));
    }
    const head = ["step", ...series.map((one) => one.label)].map((text) => h("th", { class: "num", scope: "col" }, text));
    this.tableBody ??= this.table.appendChild(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${this.title}, table` }));
    const said = every > 1 ? `Every ${count(every)}th of ${count(last - first)} points, the newest first` : "The newest first";
    replace(this.tableBody, h("table", null, h("caption", { class: "hint" }, said), h("thead", null, h("tr", null, head)), h("tbody", null, rows)));
  }

  listen() {
    this.observer = new ResizeObserver(([entry]) => {
      this.width = Math.floor(entry.contentRect.width);
      this.canvas.setAttribute("width", this.width);
      this.draw();
    });
    this.observer.observe(this.plot);
    const at = (event) => this.x.from(this.clamp(event.clientX - this.plot.getBoundingClientRect().left));
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      this.group.setCursor(at(event));
      if (this.drag && Math.abs(event.clientX - this.drag.from) > DRAG_PX) this.group.setBrush([this.drag.x, at(event)]);
    });
    this.plot.addEventListener("pointerleave", () => {
      if (!this.drag && document.activeElement !== this.plot) this.group.setCursor(null);
    });
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.x) return;
      this.drag = { from: event.clientX, x: at(event) };
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointerup", () => {
      this.drag = null;
      this.zoomToBrush();
    });
    this.plot.addEventListener("pointercancel", () => {
      this.drag = null;
      this.group.setBrush(null);
    });
    this.plot.addEventListener("dblclick", () => this.group.setDomain(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.group.setCursor(null));
  }

  key(event) {
    const { x } = this.data;
    if (x.length === 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const { first, last } = this.shown;
    const present = this.group.cursor === null ? last - 1 : nearest(x, this.group.cursor);
    const page = Math.max(1, Math.round((last - first) / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -page, PageUp: page, Home: -x.length, End: x.length };
    if (event.key in moves) {
      const next = Math.min(Math.max(present + moves[event.key], first), last - 1);
      if (event.shiftKey) this.group.setBrush([this.group.brush?.[0] ?? x[present], x[next]]);
      else this.group.setBrush(null);
      this.group.setCursor(x[next]);
    } else if (event.key === "Enter") this.zoomToBrush();
    else if (event.key === "Escape" || event.key === "0") this.group.setDomain(null);
    else if (event.key === "+" || event.key === "=") this.zoom(x[present], 0.5);
    else if (event.key === "-") this.zoom(x[present], 2);
    else return;
    event.preventDefault();
  }

  zoomToBrush() {
    const { brush } = this.group;
    if (brush === null) return;
    const [from, to] = [Math.min(...brush), Math.max(...brush)];
    if (to > from) this.group.setDomain([from, to]);
    else this.group.setBrush(null);
  }

  zoom(center, factor) {
    const { x } = this.data;
    const [low, high] = [x[0], x[x.length - 1]];
    const from = Math.max(low, center - (center - this.x.low) * factor);
    const to = Math.min(high, center + (this.x.high - center) * factor);
    this.group.setDomain(from <= low && to >= high ? null : [from, to]);
  }

  clamp(place) {
    return Math.min(Math.max(place, MARGIN.left), this.width - MARGIN.right);
  }
}

/** Return a line across a chart at `y`, and its name to the left. */
export function ruled(left, right, y, text) {
  return [
    svg("line", { class: "rule", x1: left, x2: right, y1: y, y2: y }),
    svg("text", { class: "tick", x: left - 6, y: y + 4, "text-anchor": "end" }, text),
  ];
}

/** Return the moving average of values, in which one that lies `SMOOTH_POINTS` back counts a third of the newest. */
function smoothed(values) {
  const kept = 1 - 1 / SMOOTH_POINTS;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = sum * kept + value;
    weight = weight * kept + 1;
    return sum / weight;
  });
}

/** Return the rows of a stacked chart: each lies on those before it. */
function stack(series) {
  let below = null;
  return series.map((one) => {
    const low = below ?? one.values.map((value) => (value === null ? null : 0));
    const high = one.values.map((value, index) => (value === null && low[index] === null ? null : (low[index] ?? 0) + (value ?? 0)));
    below = high;
    return { label: one.label, values: high, low, high };
  });
}

function line(values, first, last, { px, py, shown, joins = false }) {
  let path = "";
  let pen = false;
  for (let index = first; index < last; index++) {
    const value = values[index];
    if (!shown(value)) {
      pen = pen && joins;
      continue;
    }
    path += `${pen ? "L" : "M"}${px(index)} ${py(value)}`;
    if ((joins || !pen) && !shown(values[index + 1])) path += "m-1.5 0h3";
    pen = true;
  }
  return path;
}

function band(row, first, last, { px, py, shown }) {
  let path = "";
  let run = [];
  const finish = () => {
    if (run.length > 1) {
      const upper = run.map((index) => `${px(index)} ${py(row.high[index])}`);
      const lower = run.map((index) => `${px(index)} ${py(row.low[index])}`).reverse();
      path += `M${upper.concat(lower).join("L")}Z`;
    }
    run = [];
  };
  for (let index = first; index < last; index++) {
    if (shown(row.low[index]) && shown(row.high[index])) run.push(index);
    else finish();
  }
  finish();
  return path;
}
