// Curves over steps: several charts move together, are read by pointer or keyboard, and have a table beside them.

import { h, replace, titled } from "./dom.js";
import { save, toCsv } from "./files.js";
import { NOTHING, count, number, short } from "./format.js";
import { LOG, Plot, WHOLE, axis, baseAxis, drawUpright } from "./plot.js";
import { colour, inColour } from "./themes.js";

const HEIGHT = 206;
const TABLE_ROWS = 100;
const DRAG_PX = 5;
const MOST_DOTS = 60;
/** The axis of x unless another is given. */
const STEPS = { label: "step", format: count, axis: short, incrs: WHOLE };
const HELP =
  "Arrow keys read the points, with Shift they select a range, Enter zooms to it, plus and minus zoom, Escape shows everything.";

/** Charts that share the range of x and the point that is read. */
export class ChartGroup {
  /** @param {(domain: [number, number] | null) => void} changed is called when people choose another range */
  constructor(changed) {
    Object.assign(this, { changed, charts: new Set(), domain: null });
  }

  setDomain(domain, quietly = false) {
    this.domain = domain;
    this.select(null);
    for (const chart of this.charts) chart.draw();
    if (!quietly) this.changed(domain);
  }

  /** Mark a range of x in every chart, null for none. */
  select(range) {
    for (const { chart } of [...this.charts].map(({ plot }) => plot)) {
      if (chart === null) continue;
      const [from, to] = (range ?? [0, 0]).map((x) => chart.valToPos(x, "x"));
      const width = range === null ? 0 : Math.max(1, Math.abs(to - from));
      chart.setSelect({ left: Math.min(from, to), width, top: 0, height: chart.over.clientHeight }, false);
    }
  }
}

/**
 * A chart. Returns `{element, update, close, draw}`; `update({x, by, series, marks})` takes ascending `x`, its axis, and
 * - series: `{label, values, low, high, joins, limits}`: a value, and the ends of its band, for each x; null leaves a gap, unless it
 *   joins; one that limits the series of an index is a broken line in its colour
 * - marks: `{x, label, kind}`: `resume` and `wrong` are vertical lines, `save` a tick at the axis
 */
export class LineChart {
  constructor({ title, name, format = number, axis = short, unit = "", group, zero = false, stacked = false }) {
    Object.assign(this, { title, format, axis, unit: unit || title.toLowerCase(), group, zero, stacked, log: false, smooth: 0 });
    this.legend = h("div", { class: "legend" });
    this.box = h("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": title, "aria-description": HELP });
    this.table = h("details", { class: "as-table", ontoggle: () => this.fillTable() }, h("summary", null, "Table"));
    this.element = h(
      "figure",
      { class: "panel chart", test: `chart-${name}` },
      h("figcaption", null, titled(h("h3", null, title), this.button("CSV", () => this.saveCsv()), this.button("PNG", () => this.savePng())), this.legend),
      this.box,
      this.table,
    );
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("blur", () => this.plot.chart?.setCursor({ left: -1, top: -1 }, true, true));
    this.plot = new Plot(this.box, () => this.options());
    group.charts.add(this);
  }

  button(text, onclick) {
    return h("button", { type: "button", class: "small quiet", "aria-label": `${this.title} as ${text}`, test: `chart-${text.toLowerCase()}`, onclick }, text);
  }

  update({ by = STEPS, ...data }) {
    const shape = JSON.stringify([by.label, ...data.series.map(({ label, low, limits }) => [label, low !== undefined, limits])]);
    const same = shape === this.shape;
    Object.assign(this, { data, by, shape });
    this.box.setAttribute("aria-label", this.summary());
    if (same) this.draw();
    else {
      this.makeLegend();
      this.plot.draw();
    }
  }

  /** Say in words what the curves do, for those who do not see them. */
  summary() {
    const { x, series } = this.data;
    const parts = series.map(({ label, values }) => {
      const known = values.filter((value) => value !== null);
      return known.length === 0 ? `${label} not known` : `${label} from ${this.format(Math.min(...known))} to ${this.format(Math.max(...known))}`;
    });
    return `${this.title} by ${this.by.label}, from ${this.by.format(x[0])} to ${this.by.format(x.at(-1))}: ${parts.join(", ")}`;
  }

  setLog(log) {
    this.log = log;
    this.plot.draw();
  }

  /** Draw moving averages beside the values: of each the one before weighs `smooth`, from 0 for none to 1. */
  setSmooth(smooth) {
    this.smooth = smooth;
    this.plot.draw();
  }

  close() {
    this.group.charts.delete(this);
    this.plot.close();
  }

  /** Draw other data, or another range. */
  draw() {
    this.plot.chart?.setData(this.columns(this.lines()));
  }

  /** Return what is drawn, from back to front: each curve after both ends of its band. */
  lines() {
    const rows = this.stacked ? stack(this.data.series) : this.data.series;
    return rows.flatMap((row, index) => {
      const line = { ...row, colour: `series-${(row.limits ?? index) % 8}`, width: this.stacked || row.limits !== undefined ? 1 : 1.6, isBroken: isBroken(row.limits, index) };
      const band = row.low && row.high ? [row.high, row.low].map((values) => ({ ...line, values, isEnd: true })) : [];
      if (!this.smooth || this.stacked) return [...band, line];
      return [...band, { ...line, alpha: 0.3 }, { ...line, values: smoothed(row.values, this.smooth) }];
    });
  }

  columns(lines) {
    const shown = (values) => (this.log ? values.map((value) => (value > 0 ? value : null)) : values);
    return [this.data.x, ...lines.map(({ values }) => shown(values))];
  }

  options() {
    if (!this.data) return null;
    const lines = this.lines();
    const tops = lines.flatMap((line, index) => (line.isEnd && line.values === line.high ? [index] : []));
    const kinds = { resume: { stroke: colour("warn"), dash: [4, 3] }, wrong: { stroke: colour("bad"), width: 2 }, save: { stroke: colour("accent"), width: 1.5, height: 6 } };
    const least = this.zero ? { soft: 0, mode: 1, pad: 0.05 } : { pad: 0.05 };
    return {
      data: this.columns(lines),
      height: HEIGHT,
      scales: {
        x: { time: false, range: (_, low, high) => this.group.domain ?? [low, high] },
        y: this.log ? LOG.scale : { range: { min: least, max: { pad: 0.05 } } },
      },
      series: [{}, ...lines.map(seriesOf)],
      bands: tops.map((top) => ({ series: [top + 1, top + 2], fill: colour(lines[top].colour, 0.2) })),
      axes: [baseAxis(this.by.label, this.by.axis, { incrs: this.by.incrs }), axis(this.unit, this.axis, { size: 58, ...(this.log && LOG.axis) })],
      cursor: {
        sync: { key: "steps", scales: ["x", null] },
        drag: { setScale: false, dist: DRAG_PX },
        bind: { dblclick: () => () => this.group.setDomain(null) },
      },
      hooks: {
        setCursor: [() => this.read()],
        setSelect: [({ cursor }) => cursor.event && this.zoomToSelected()],
        draw: [(chart) => drawUpright(chart, this.data.marks.map((mark) => ({ ...mark, ...kinds[mark.kind] }))), () => this.read(), () => this.fillTable()],
      },
    };
  }

  /** The index of the point that is read, of the last one that is shown if none is. */
  get at() {
    return this.plot.chart.cursor.idx ?? this.plot.chart.series[0].idxs[1];
  }

  /** Show the values at the point that is read. */
  read() {
    const { x, series, marks } = this.data;
    const { at } = this;
    const { cursor, valToIdx } = this.plot.chart;
    const near = marks.filter((mark) => cursor.idx !== null && valToIdx(mark.x) === at).map((mark) => mark.label);
    for (const [index, one] of series.entries()) this.values[index].textContent = this.textAt(one, at);
    this.stepText.textContent = this.by.format(x[at]);
    this.box.title = near.join(", ");
    const spoken = series.map((one, index) => `${one.label} ${this.values[index].textContent}`);
    this.box.setAttribute("aria-valuemin", x[0]);
    this.box.setAttribute("aria-valuemax", x.at(-1));
    this.box.setAttribute("aria-valuenow", x[at]);
    this.box.setAttribute("aria-valuetext", `${this.by.label} ${this.by.format(x[at])}: ${[...spoken, ...near].join(", ")}`);
  }

  /** Write the value of a curve at an index; of one that goes over gaps the last one there, with its place if none follows. */
  textAt({ values, joins }, at) {
    const last = joins ? values.slice(0, at + 1).findLastIndex((value) => value !== null) : at;
    const isOver = last >= 0 && last < at && !values.slice(at).some((value) => value !== null);
    return this.format(values[last]) + (isOver ? ` (${this.by.label} ${this.by.format(this.data.x[last])})` : "");
  }

  makeLegend() {
    this.stepText = h("output", null, NOTHING);
    this.values = this.data.series.map(() => h("output", null, NOTHING));
    replace(
      this.legend,
      h("span", { class: "key" }, `${this.by.label} `, this.stepText),
      this.data.series.map(({ label, limits }, index) =>
        h("span", { class: "key" }, h("i", { class: `swatch ${isBroken(limits, index) ? "limit" : ""}`, style: inColour((limits ?? index) % 8) }), `${label} `, this.values[index]),
      ),
    );
  }

  /** Fill the table, where it is open, with some of the points that are shown. */
  fillTable() {
    if (!this.table.open || !this.plot.chart) return;
    const { x, series } = this.data;
    const [first, last] = this.plot.chart.series[0].idxs;
    const every = Math.max(1, Math.ceil((last + 1 - first) / TABLE_ROWS));
    const rows = [];
    for (let index = last; index >= first; index -= every) {
      rows.push(h("tr", null, h("td", { class: "num" }, this.by.format(x[index])), series.map((one) => h("td", { class: "num" }, this.format(one.values[index])))));
    }
    const head = [this.by.label, ...series.map((one) => one.label)].map((text) => h("th", { class: "num", scope: "col" }, text));
    this.tableBody ??= this.table.appendChild(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${this.title}, table` }));
    const said = every > 1 ? `1 point in ${count(every)} of ${count(last + 1 - first)}, the newest first` : "The newest first";
    replace(this.tableBody, h("table", null, h("caption", { class: "hint" }, said), h("thead", null, h("tr", null, head)), h("tbody", null, rows)));
  }

  key(event) {
    const { x } = this.data;
    const { chart } = this.plot;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [first, last] = chart.series[0].idxs;
    const present = this.at;
    const page = Math.max(1, Math.round((last - first) / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -page, PageUp: page, Home: -x.length, End: x.length };
    if (event.key in moves) {
      const next = Math.min(Math.max(present + moves[event.key], first), last);
      if (!event.shiftKey) this.anchor = null;
      else this.anchor ??= x[present];
      this.group.select(this.anchor === null ? null : [this.anchor, x[next]]);
      chart.setCursor({ left: chart.valToPos(x[next], "x"), top: 0 }, true, true);
    } else if (event.key === "Enter") this.zoomToSelected();
    else if (event.key === "Escape" || event.key === "0") this.group.setDomain(null);
    else if (event.key === "+" || event.key === "=") this.zoom(x[present], 0.5);
    else if (event.key === "-") this.zoom(x[present], 2);
    else return;
    event.preventDefault();
  }

  /** Save what is shown: a row for each x, a column for each curve, and for its moving average if there is one. */
  saveCsv() {
    const { x, series } = this.data;
    const [first, last] = this.plot.chart.series[0].idxs;
    const rows = (this.stacked || !this.smooth ? [] : series).map(({ label, values }) => ({ label: `${label} (smoothed ${this.smooth})`, values: smoothed(values, this.smooth) }));
    const columns = [{ label: this.by.label, values: x }, ...series, ...rows];
    save(`${this.title}.csv`, new Blob([toCsv(columns.map(({ label, values }) => [label, ...values.slice(first, last + 1)]))], { type: "text/csv" }));
  }

  /** Save the plot with its title and the names of its curves. */
  savePng() {
    const { canvas } = this.plot.chart.ctx;
    const scale = canvas.width / this.plot.chart.width;
    const image = document.createElement("canvas");
    const pen = image.getContext("2d");
    const font = "12px system-ui, sans-serif";
    pen.font = font;
    const keys = [{ label: this.title, x: 12, y: 20 }];
    let [left, top] = [12, 40];
    for (const [index, { label, limits }] of this.data.series.entries()) {
      const width = pen.measureText(label).width + 32;
      if (left + width > this.plot.chart.width && left > 12) [left, top] = [12, top + 18];
      keys.push({ label, x: left, y: top, stroke: colour(`series-${(limits ?? index) % 8}`) });
      left += width;
    }
    Object.assign(image, { width: canvas.width, height: canvas.height + (top + 10) * scale });
    pen.fillStyle = colour("surface");
    pen.fillRect(0, 0, image.width, image.height);
    pen.drawImage(canvas, 0, (top + 10) * scale);
    pen.scale(scale, scale);
    for (const { label, x, y, stroke } of keys) {
      pen.font = stroke ? font : `bold ${font}`;
      pen.fillStyle = stroke ?? colour("text");
      if (stroke) pen.fillRect(x, y - 9, 10, 10);
      pen.fillStyle = colour("text");
      pen.fillText(label, stroke ? x + 16 : x, y);
    }
    image.toBlob((blob) => save(`${this.title}.png`, blob));
  }

  zoomToSelected() {
    const { select, posToVal } = this.plot.chart;
    this.anchor = null;
    if (select.width > 1) this.group.setDomain([select.left, select.left + select.width].map((place) => posToVal(place, "x")));
    else this.group.select(null);
  }

  zoom(center, factor) {
    const [low, high] = [this.data.x[0], this.data.x.at(-1)];
    const { min, max } = this.plot.chart.scales.x;
    const from = Math.max(low, center - (center - min) * factor);
    const to = Math.min(high, center + (max - center) * factor);
    this.group.setDomain(from <= low && to >= high ? null : [from, to]);
  }
}

/** Return whether the line of a curve is broken: it limits another one, or that colour was taken. */
function isBroken(limits, index) {
  return limits !== undefined || index >= 8;
}

/** Return options of uPlot for a line; the ends of a band are not seen. */
function seriesOf({ isEnd, colour: name, width, alpha, joins = false, isBroken }) {
  if (isEnd) return { width: 0, points: { show: false, size: 0 } };
  const stroke = colour(name);
  // A point that no line shows is a dot: one between gaps, and of a line over gaps each that is before one, if they are few.
  const filter = (chart, index) => {
    const isKnown = (at) => (chart.data[index][at] ?? null) !== null;
    const known = [...chart.data[index].keys()].filter(isKnown);
    return joins && known.length > MOST_DOTS ? [] : known.filter((at) => !isKnown(at + 1) && (joins || !isKnown(at - 1)));
  };
  const points = { show: false, filter, size: 6, width: 0, stroke, fill: stroke };
  return { stroke, width, alpha, pxAlign: 0, spanGaps: joins, dash: isBroken ? [6, 4] : undefined, points };
}

/** Return the exponential moving average of values, of which each former one counts `kept` times as much as the next. */
function smoothed(values, kept) {
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
