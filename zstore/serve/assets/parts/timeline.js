// The chart of a run's checkpoints: what each shares, and what removing it alone would free.

import { h, replace } from "../dom.js";
import { bytes, count, counted, short, when } from "../format.js";
import { BARS, Plot, WHOLE, axis, bars, baseAxis } from "../plot.js";
import { colour, inColour } from "../themes.js";
import { axisBytes } from "./curves.js";

const HEIGHT = 216;
const LEAST_PX = 4;
const MOST_PX = 28;
/** What is beside the bars, at both ends together. */
const MARGIN_PX = 82;
/** Of the parts of a bar: series, and how much of its colour is seen. */
const COLOURS = { rest: [7, 0.55], shared: [0, 0.45], freed: [1, 1] };

/** Bars along steps or times. People who do not see it have the table below it. */
export class Timeline {
  /** @param {(entry: object) => void} onPick Called with the checkpoint of a bar that is clicked, the last of several. */
  constructor(onPick) {
    this.slots = [];
    this.marks = { axis: "step", selected: [], doomed: new Set() };
    this.frame = h("div", { class: "timeline", role: "img", test: "timeline" });
    this.readout = h("p", { class: "readout", test: "timeline-readout" });
    this.legend = h("p", { class: "legend" });
    this.element = h("div", null, this.legend, this.frame, this.readout);
    this.frame.addEventListener("click", () => {
      const slot = this.slots[this.plot.chart?.cursor.idx];
      if (slot !== undefined) onPick(slot.entries.at(-1));
    });
    this.plot = new Plot(this.frame, (width) => this.options(width));
  }

  /**
   * @param {object[]} entries Checkpoints.
   * @param {object} marks `axis`: step or time; `selected`: keys; `doomed`: keys of those that a prune would remove.
   */
  show(entries, marks) {
    this.entries = entries;
    this.marks = { ...this.marks, ...marks };
    this.plot.draw();
  }

  close() {
    this.plot.close();
  }

  options(width) {
    const { entries } = this;
    if (!entries?.length) {
      this.slots = [];
      replace(this.readout, "No checkpoint matches the filter.");
      return null;
    }
    const byTime = this.marks.axis === "time";
    const room = width - MARGIN_PX - MOST_PX;
    this.slots = slotsOf(entries, (entry) => (byTime ? entry.committed_at : entry.step), room);
    const [low, high] = [this.slots[0].at, this.slots.at(-1).at];
    const half = high > low ? ((high - low) * MOST_PX) / 2 / room : 1;
    const widths = { size: [1, MOST_PX, LEAST_PX - 1], gap: 1 };
    const places = [];
    const layer = (name, each) => ({ paths: bars({ ...widths, each }), fill: colour(`series-${COLOURS[name][0]}`, COLOURS[name][1]), width: 0, points: { show: false } });
    replace(this.legend, legend(this.slots));
    this.frame.setAttribute("aria-label", this.summary(low, high));
    this.say(null);
    return {
      ...BARS,
      data: [
        this.slots.map(({ at }) => at),
        this.slots.map(({ size }) => size),
        this.slots.map(({ freed, shared }) => freed + shared),
        this.slots.map(({ freed }) => freed),
      ],
      height: HEIGHT,
      padding: [10, 24, 0, 0],
      scales: { x: { time: byTime, range: [low - half, high + half] }, y: { range: [0, Math.max(1, ...this.slots.map(({ size }) => size))] } },
      series: [{}, layer("rest"), layer("shared"), layer("freed", (chart, series, index, left, top, wide) => (places[index] = [left, wide]))],
      bands: [{ series: [1, 2] }, { series: [2, 3] }],
      axes: [
        baseAxis(byTime ? "saved at" : "step", short, { gap: 12, size: 26, ...(byTime ? { values: (_, times, axisIndex, space, apart) => timeTexts(times, apart) } : { incrs: WHOLE }) }),
        axis(null, axisBytes, { size: 58 }),
      ],
      hooks: { draw: [(chart) => this.drawMarks(chart, places)], setCursor: [({ cursor }) => this.say(this.slots[cursor.idx] ?? null)] },
    };
  }

  /** Mark checkpoints that a prune would remove, and those that are selected. */
  drawMarks({ ctx, bbox }, places) {
    const bottom = bbox.top + bbox.height;
    const px = devicePixelRatio;
    const [veil, bad, accent] = [colour("surface", 0.55), colour("bad"), colour("accent")];
    ctx.save();
    for (const [index, { entries }] of this.slots.entries()) {
      const [left, width] = places[index];
      const gone = entries.filter((entry) => this.marks.doomed.has(entry.checkpoint)).length;
      if (gone > 0) {
        ctx.fillStyle = veil;
        ctx.fillRect(left, bbox.top, width, bbox.height);
        ctx.fillStyle = bad;
        ctx.fillRect(left, bottom + px, width, 4 * px * Math.max(0.25, gone / entries.length));
      }
      if (entries.some((entry) => this.marks.selected.includes(entry.checkpoint))) {
        const [x, y] = [left + width / 2, bottom + 2 * px];
        ctx.fillStyle = accent;
        ctx.fill(new Path2D(`M${x} ${y}l${-5 * px} ${8 * px}h${10 * px}z`));
      }
    }
    ctx.restore();
  }

  summary(low, high) {
    const steps = this.marks.axis === "time" ? `${when(low)} to ${when(high)}` : `steps ${count(low)} to ${count(high)}`;
    return `Sizes of ${counted(this.entries.length, "checkpoint")}, ${steps}; the table below lists them.`;
  }

  say(slot) {
    if (slot === null) {
      const hint = this.slots.some(({ entries }) => entries.length > 1) ? "A bar is the mean of the checkpoints at its place. " : "";
      replace(this.readout, `${hint}Click a bar to find it in the table.`);
      return;
    }
    const one = slot.entries.length === 1 ? "it" : "one";
    const sizes = `${bytes(slot.size)}, of that ${bytes(slot.shared)} shared; removing ${one} frees ${bytes(slot.freed)}`;
    replace(this.readout, h("bdi", null, nameOf(slot)), `: ${sizes}`);
  }
}

/**
 * Return the bars on an axis of `width` pixels, each `{at, entries, size, shared, freed}` with means of bytes. If bars would lie on each
 * other, those at a place are one.
 */
function slotsOf(entries, positionOf, width) {
  const positions = new Set(entries.map(positionOf));
  const low = Math.min(...positions);
  const most = Math.max(1, Math.floor(width / LEAST_PX));
  const apart = (Math.max(...positions) - low) / most;
  const placed = (position) => low + Math.round((position - low) / apart) * apart;
  const isFull = new Set([...positions].map(placed)).size < positions.size;
  const found = Map.groupBy(entries, (entry) => (isFull ? placed(positionOf(entry)) : positionOf(entry)));
  const mean = (group, field) => group.reduce((sum, entry) => sum + entry[field], 0) / group.length;
  return [...found]
    .sort(([a], [b]) => a - b)
    .map(([at, group]) => ({ at, entries: group, size: mean(group, "size_bytes"), shared: mean(group, "shared_bytes"), freed: mean(group, "freed_bytes") }));
}

/** Return the days or clock times of ticks that are `apart` seconds from each other, each once. */
function timeTexts(times, apart) {
  const clock = { hour: "2-digit", minute: "2-digit", second: apart < 60 ? "2-digit" : undefined };
  const format = new Intl.DateTimeFormat("en-GB", apart < 86400 ? clock : { month: "short", day: "numeric" });
  const texts = times.map((at) => format.format(at * 1000));
  return texts.map((text, index) => (text === texts[index - 1] ? null : text));
}

function nameOf({ entries }) {
  const steps = entries.map((entry) => entry.step);
  if (entries.length === 1) return `${entries[0].tag.slice(0, 60)}, step ${count(steps[0])}`;
  const range = `steps ${count(Math.min(...steps))} to ${count(Math.max(...steps))}`;
  return `${counted(entries.length, "checkpoint")}, ${range}, each`;
}

function legend(slots) {
  const entry = (name, text) => h("span", { class: "key" }, h("span", { class: "swatch", style: inColour(...COLOURS[name]) }), text);
  return [
    entry("freed", "freed when it is removed"),
    entry("shared", "shared with other checkpoints"),
    slots.some((slot) => slot.size > slot.shared + slot.freed) ? entry("rest", "shared with the run's working files") : null,
  ];
}
