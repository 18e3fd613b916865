// Charts side by side that move together, and what people set for all of them: smoothing, a logarithmic scale, the range.

import { ChartGroup, LineChart } from "../charts.js";
import { h, replace, titled } from "../dom.js";
import { here, note } from "../router.js";

const KEYS = "Drag to zoom. Keyboard: arrows read, Shift+arrows and Enter zoom, Esc resets";
/** The key of the marks by kind: a colour, and a sign with a word. */
const MARKS = { resume: ["warn", "┆ resumed"], save: ["accent", "╷ saved"], wrong: ["bad", "│ not finite"] };
const MOST_SMOOTH = 0.99;

/** The charts; the URL keeps what is set. `changed` is called with the range that people choose, null for all of it. */
export class ChartGrid {
  constructor(title, changed, ...tools) {
    this.group = new ChartGroup((domain) => {
      this.all.disabled = domain === null;
      changed(domain);
    });
    this.charts = new Map();
    const { query } = here();
    this.isLog = query.get("log") === "1";
    this.smooth = Math.min(MOST_SMOOTH, Math.max(0, Number(query.get("smooth")) || 0));
    this.log = h("button", { type: "button", class: "small", "aria-pressed": String(this.isLog), onclick: () => this.setLog(!this.isLog), test: "log" }, "Log scale");
    this.all = h("button", { type: "button", class: "small", disabled: true, onclick: () => this.group.setDomain(null), test: "zoom-all" }, "Zoom out");
    this.slider = h("input", { type: "range", min: "0", max: MOST_SMOOTH, step: "0.01", value: this.smooth, test: "smooth" });
    this.slider.addEventListener("input", () => this.setSmooth(Number(this.slider.value)));
    this.marks = h("span", { class: "legend", test: "marks-key" });
    this.grid = h("div", { class: "grid charts" });
    this.element = h(
      "section",
      { class: "view", "aria-label": title },
      titled([h("h2", null, title), this.marks], h("span", { class: "hint keys" }, KEYS), tools, h("label", { class: "smooth" }, "Smoothing ", this.slider), this.log, this.all),
      this.grid,
    );
  }

  /** Draw charts, each the options of `LineChart`, and `log`, whether a logarithmic scale makes sense; `data` is drawn. */
  show(specs) {
    const shown = specs.map(({ data, ...spec }) => {
      const chart = this.chart(spec);
      chart.update(data);
      return chart.element;
    });
    const same = shown.length === this.grid.children.length && shown.every((element, index) => element === this.grid.children[index]);
    if (!same) replace(this.grid, shown);
    const kinds = new Set(specs.flatMap(({ data }) => data.marks.map(({ kind }) => kind)));
    replace(this.marks, [...kinds].map((kind) => h("span", { style: { color: `var(--${MARKS[kind][0]})` } }, MARKS[kind][1])));
  }

  chart(spec) {
    if (!this.charts.has(spec.name)) {
      const chart = new LineChart({ ...spec, group: this.group });
      if (spec.log) chart.setLog(this.isLog);
      chart.setSmooth(this.smooth);
      this.charts.set(spec.name, { chart, canBeLog: spec.log });
    }
    return this.charts.get(spec.name).chart;
  }

  setLog(isLog) {
    this.isLog = isLog;
    note({ log: isLog ? "1" : null });
    this.log.setAttribute("aria-pressed", String(isLog));
    for (const { chart, canBeLog } of this.charts.values()) if (canBeLog) chart.setLog(isLog);
  }

  setSmooth(smooth) {
    this.smooth = smooth;
    note({ smooth: smooth > 0 ? String(smooth) : null });
    for (const { chart } of this.charts.values()) chart.setSmooth(smooth);
  }

  /** Show x from and to those of `domain`, without a call of `changed`. */
  setDomain(domain) {
    this.all.disabled = domain === null;
    this.group.setDomain(domain, true);
  }

  close() {
    for (const { chart } of this.charts.values()) chart.close();
  }
}
