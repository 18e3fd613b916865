// Curves over steps, side by side: they are zoomed together, and read by pointer or keyboard.

import { h, replace, swatch, titled } from "./dom.js";
import { count, number, short, ticks } from "./format.js";
import { default as uPlot } from "./vendor/uPlot.js";

const HEIGHT = 206;
const DRAG_PX = 5;
const MOST_DOTS = 60;
const FONT = "11px system-ui, sans-serif";
const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();
const MARKS = {
  resumed: { colour: "warn", sign: "┆", dash: [4, 3] },
  saved: { colour: "accent", sign: "╷", height: 6 },
  "not finite": { colour: "bad", sign: "│" },
};
const HELP = "Arrow keys read the points, plus and minus zoom, Escape shows everything.";

/** Return the present value of a colour of page.css, for drawing on a canvas; `share` of it is seen. */
function colour(name, share = 1) {
  const style = { color: `color-mix(in srgb, var(--${name}) ${100 * share}%, transparent)` };
  const probe = document.body.appendChild(h("span", { hidden: true, style }));
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** Charts over the same steps. */
export class Charts {
  constructor() {
    Object.assign(this, { charts: new Map(), zoom: null });
    this.all = h("button", { type: "button", disabled: true, test: "zoom-all" }, "Zoom out");
    this.all.addEventListener("click", () => this.setZoom(null));
    this.key = h("span", { class: "legend" });
    this.grid = h("div", { class: "charts" });
    const hint = h("span", { class: "muted wide" }, "Drag to zoom");
    const title = [h("h2", null, "Curves"), this.key];
    this.element = h("section", { class: "view", "aria-label": "Curves" }, titled(title, hint, this.all), this.grid);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.charts.forEach((chart) => chart.make());
    this.scheme.addEventListener("change", this.redraw);
  }

  /**
   * Draw charts over ascending `steps`. Of each: `{name, title, unit, format, axis, zero, stacked, smooth, series}`, and of a
   * series `{label, values, joins, limits}`: null leaves a gap, unless it joins; one that limits the series of an index is a
   * broken line in its colour. `marks` are `{step, kind, label}`, kinds as in `MARKS`.
   */
  show(steps, charts, marks) {
    const shown = charts.map((spec) => {
      if (!this.charts.has(spec.name)) this.charts.set(spec.name, new Chart(spec, this));
      const chart = this.charts.get(spec.name);
      chart.update(steps, spec.series, marks);
      return chart.element;
    });
    const isSame =
      shown.length === this.grid.children.length && shown.every((one, at) => one === this.grid.children[at]);
    if (!isSame) replace(this.grid, shown);
    const kinds = [...new Set(marks.map(({ kind }) => kind))];
    const keys = kinds.map((kind) => h("span", { class: "key" }, `${MARKS[kind].sign} ${kind}`));
    replace(this.key, keys);
  }

  /** Show the steps from one to another, all of them if null. */
  setZoom(range) {
    this.zoom = range;
    this.all.disabled = range === null;
    for (const { plot } of this.charts.values()) {
      plot?.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      plot?.setData(plot.data);
    }
  }

  close() {
    this.scheme.removeEventListener("change", this.redraw);
    for (const chart of this.charts.values()) chart.close();
  }
}

class Chart {
  constructor({ series: _, ...spec }, group) {
    this.spec = { unit: spec.title.toLowerCase(), format: number, axis: short, ...spec };
    Object.assign(this, { group, plot: null, series: [] });
    this.legend = h("div", { class: "legend" });
    this.box = h("div", { class: "plot", tabindex: "0", role: "slider", "aria-description": HELP });
    this.box.addEventListener("keydown", (event) => this.press(event));
    this.box.addEventListener("blur", () => this.plot?.setCursor({ left: -1, top: -1 }, true, true));
    const caption = h("figcaption", null, h("h3", null, spec.title), this.legend);
    this.element = h("figure", { class: "panel chart", test: `chart-${spec.name}` }, caption, this.box);
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(this.box);
  }

  update(steps, series, marks) {
    const isSame =
      JSON.stringify(series.map(({ label }) => label)) === JSON.stringify(this.series.map(({ label }) => label));
    Object.assign(this, { steps, series, marks });
    this.box.setAttribute("aria-label", this.summary());
    if (isSame && this.plot !== null) this.plot.setData(this.columns());
    else {
      this.makeLegend();
      this.make();
    }
  }

  /** Say in words what the curves do, for those who do not see them. */
  summary() {
    const parts = this.series.map(({ label, values }) => {
      const known = values.filter((value) => value !== null);
      const [least, most] = [Math.min(...known), Math.max(...known)].map((value) => this.spec.format(value));
      return `${label} from ${least} to ${most}`;
    });
    return `${this.spec.title}, steps ${count(this.steps[0])} to ${count(this.steps.at(-1))}: ${parts.join(", ")}`;
  }

  makeLegend() {
    this.stepText = h("output");
    this.values = this.series.map(() => h("output"));
    const keys = this.series.map(({ label, limits }, index) => {
      const colours = swatch((limits ?? index) % 8, limits === undefined ? "" : "limit");
      return h("span", { class: "key" }, colours, `${label} `, this.values[index]);
    });
    replace(this.legend, h("span", { class: "key" }, "step ", this.stepText), keys);
  }

  /** Make the plot anew, as wide as its place. */
  make() {
    const width = this.box.clientWidth;
    if (width === 0) return;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(width), this.columns(), this.box);
  }

  fit() {
    if (this.plot === null) this.make();
    else if (this.box.clientWidth > 0) this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT });
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  columns() {
    return [this.steps, ...this.lines().map(({ values }) => values)];
  }

  /** Return what is drawn: of a stacked chart sums, and behind a smooth curve its values. */
  lines() {
    const lines = this.series.map((one, index) => ({ ...one, colour: `series-${(one.limits ?? index) % 8}` }));
    if (this.spec.smooth) {
      const both = (line) => [{ ...line, alpha: 0.3 }, { ...line, values: smoothed(line.values) }];
      return lines.flatMap((line) => (line.joins ? [line] : both(line)));
    }
    if (!this.spec.stacked) return lines;
    let below = lines[0].values.map(() => null);
    return lines.map((line) => {
      below = line.values.map((value, at) => (value === null ? below[at] : (below[at] ?? 0) + value));
      return { ...line, values: below };
    });
  }

  options(width) {
    const lines = this.lines();
    const { axis, unit, zero, stacked } = this.spec;
    const least = zero ? { soft: 0, mode: 1, pad: 0.05 } : { pad: 0.05 };
    const fill = (line) => colour(line.colour, 0.2);
    return {
      width,
      height: HEIGHT,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => this.group.zoom ?? [low, high] },
        y: { range: { min: least, max: { pad: 0.05 } } },
      },
      series: [
        {},
        ...lines.map((line, index) => ({ ...seriesOf(line), fill: stacked && index === 0 ? fill(line) : undefined })),
      ],
      bands: stacked ? lines.slice(1).map((line, index) => ({ series: [index + 2, index + 1], fill: fill(line) })) : [],
      axes: [
        axisOf("step", count, { size: 20, space: 60, incrs: WHOLE, grid: { show: false } }),
        axisOf(unit, axis, { size: 58 }),
      ],
      cursor: {
        y: false,
        sync: { key: "steps", scales: ["x", null] },
        drag: { setScale: false, dist: DRAG_PX },
        bind: { dblclick: () => () => this.group.setZoom(null) },
      },
      hooks: {
        setCursor: [() => this.read()],
        setSelect: [({ cursor, select }) => cursor.event && select.width > 1 && this.zoomTo(select)],
        draw: [(plot) => this.drawMarks(plot), () => this.read()],
      },
    };
  }

  zoomTo({ left, width }) {
    this.group.setZoom([left, left + width].map((place) => this.plot.posToVal(place, "x")));
  }

  /** The index of the point that is read; of the last one that is shown if none is. */
  get at() {
    return this.plot.cursor.idx ?? this.plot.series[0].idxs[1];
  }

  /** Show the values at the point that is read; of a curve that goes over gaps the last one there. */
  read() {
    if (this.plot === null) return;
    const { at, steps } = this;
    for (const [index, { values, joins }] of this.series.entries()) {
      const known = joins ? values.slice(0, at + 1).findLast((value) => value !== null) : values[at];
      this.values[index].textContent = this.spec.format(known);
    }
    const near = this.marks.filter(({ step }) => this.plot.cursor.idx !== null && step === steps[at]);
    const spoken = this.series.map(({ label }, index) => `${label} ${this.values[index].textContent}`);
    this.stepText.textContent = count(steps[at]);
    this.box.title = near.map(({ label }) => label).join(", ");
    const aria = { valuemin: steps[0], valuemax: steps.at(-1), valuenow: steps[at] };
    aria.valuetext = `step ${count(steps[at])}: ${[...spoken, ...near.map(({ label }) => label)].join(", ")}`;
    for (const [name, value] of Object.entries(aria)) this.box.setAttribute(`aria-${name}`, value);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { plot, steps, at } = this;
    const [first, last] = plot.series[0].idxs;
    const page = Math.max(1, Math.round((last - first) / 20));
    const ends = { Home: -steps.length, End: steps.length };
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -page, PageUp: page, ...ends };
    if (event.key in moves) {
      const next = Math.min(Math.max(at + moves[event.key], first), last);
      plot.setCursor({ left: plot.valToPos(steps[next], "x"), top: 0 }, true, true);
    } else if (event.key === "Escape") this.group.setZoom(null);
    else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
    else if (event.key === "-") this.zoomBy(2);
    else return;
    event.preventDefault();
  }

  zoomBy(factor) {
    const { min, max } = this.plot.scales.x;
    const center = this.steps[this.at];
    const from = Math.max(this.steps[0], center - (center - min) * factor);
    const to = Math.min(this.steps.at(-1), center + (max - center) * factor);
    this.group.setZoom(from <= this.steps[0] && to >= this.steps.at(-1) ? null : [from, to]);
  }

  drawMarks({ ctx, bbox, scales, valToPos }) {
    const ratio = uPlot.pxRatio;
    const bottom = bbox.top + bbox.height;
    ctx.save();
    ctx.lineWidth = ratio;
    for (const { step, kind } of this.marks) {
      if (step < scales.x.min || step > scales.x.max) continue;
      const { colour: name, dash = [], height } = MARKS[kind];
      const at = Math.round(valToPos(step, "x", true));
      ctx.strokeStyle = colour(name);
      ctx.setLineDash(dash.map((length) => length * ratio));
      ctx.beginPath();
      ctx.moveTo(at, height === undefined ? bbox.top : bottom - height * ratio);
      ctx.lineTo(at, bottom);
      ctx.stroke();
    }
    ctx.restore();
  }
}

function axisOf(label, text, options) {
  return {
    label,
    font: FONT,
    labelFont: FONT,
    labelSize: 16,
    stroke: colour("muted"),
    grid: { stroke: colour("line"), width: 1 },
    ticks: { show: false },
    values: (_, values) => ticks(values, text),
    ...options,
  };
}

/** Return options of uPlot for a line. */
function seriesOf({ colour: name, alpha, joins = false, limits }) {
  const stroke = colour(name);
  // A point that no line shows is a dot: one between gaps, and each of a line over gaps, if they are few.
  const filter = (plot, index) => {
    const isKnown = (at) => (plot.data[index][at] ?? null) !== null;
    const known = [...plot.data[index].keys()].filter(isKnown);
    return joins && known.length > MOST_DOTS
      ? []
      : known.filter((at) => joins || (!isKnown(at + 1) && !isKnown(at - 1)));
  };
  const points = { show: false, filter, size: 5, width: 0, stroke, fill: stroke };
  const dash = limits === undefined ? undefined : [6, 4];
  return { stroke, width: 1.5, alpha, pxAlign: 0, spanGaps: joins, dash, points };
}

/** Return the mean around each value, over a fiftieth of all. */
function smoothed(values) {
  const reach = Math.floor(values.length / 100);
  return values.map((value, at) => {
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((one) => one !== null);
    return value === null ? null : near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}
