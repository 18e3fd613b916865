// The chart of a run's checkpoints: what each shares, and what removing it alone would free.

import { ruled } from "../charts.js";
import { h, replace, svg } from "../dom.js";
import { bytes, count, counted, short, when } from "../format.js";
import { ticks } from "../scales.js";
import { layOut, roundTimes, slotAt } from "./slots.js";

const HEIGHT = 200;
const LEFT = 64;
const RIGHT = 20;
const TOP = 10;
const BOTTOM = 26;

/** Bars along steps or times. People who do not see it have the table below it. */
export class Timeline {
  /** @param {(entry: object) => void} onPick Called with the checkpoint of a bar that is clicked, the last of several. */
  constructor(onPick) {
    this.onPick = onPick;
    this.entries = [];
    this.marks = { axis: "step", selected: [], doomed: new Set() };
    this.chart = svg("svg", { class: "timeline", role: "img", height: HEIGHT, test: "timeline" });
    this.readout = h("p", { class: "readout", test: "timeline-readout" });
    this.frame = h("div", { class: "timeline-frame" }, this.chart);
    this.legend = h("p", { class: "legend" });
    this.element = h("div", null, this.legend, this.frame, this.readout);
    this.frame.addEventListener("pointermove", (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.entries.length > 0 && this.say(null));
    this.frame.addEventListener("click", (event) => this.pick(event));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.frame);
  }

  /**
   * @param {object[]} entries Checkpoints.
   * @param {object} marks `axis`: step or time; `selected`: keys; `doomed`: keys of those that a prune would remove.
   */
  show(entries, marks) {
    this.entries = entries;
    this.marks = { ...this.marks, ...marks };
    this.draw();
  }

  close() {
    this.observer.disconnect();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (width === 0) return;
    if (this.entries.length === 0) {
      this.slots = [];
      replace(this.chart);
      replace(this.readout, "No checkpoint matches the filter.");
      return;
    }
    const byTime = this.marks.axis === "time";
    const placed = layOut(this.entries, (entry) => (byTime ? entry.committed_at : entry.step), width - LEFT - RIGHT);
    this.slots = placed.slots.map((slot) => ({ ...slot, x: slot.x + LEFT }));
    const highest = Math.max(1, ...this.slots.map((slot) => slot.size));
    const yOf = (size) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - size / highest);
    replace(this.legend, legend(this.slots));
    this.chart.setAttribute("width", width);
    this.chart.setAttribute("aria-label", this.summary(placed));
    replace(
      this.chart,
      ticks(0, highest, 4).map((size) => ruled(LEFT, width - RIGHT, yOf(size), bytes(size))),
      this.axis(placed, width, byTime),
      this.slots.map((slot) => this.bar(slot, yOf)),
    );
    this.say(null);
  }

  summary({ low, high }) {
    const steps = this.marks.axis === "time" ? `${when(low)} to ${when(high)}` : `steps ${count(low)} to ${count(high)}`;
    return `Sizes of ${counted(this.entries.length, "checkpoint")}, ${steps}; the table below lists them.`;
  }

  axis({ low, high, slots }, width, byTime) {
    if (slots.length === 0) return [];
    const barWidth = slots[0].width;
    const room = Math.max(0, width - LEFT - RIGHT - barWidth);
    const most = Math.max(1, Math.floor(room / 90));
    const marks = byTime ? roundTimes(low, high, most) : roundSteps(low, high, most);
    return marks.map(({ at, text }) => {
      const x = LEFT + barWidth / 2 + (high > low ? ((at - low) / (high - low)) * room : room / 2);
      return svg("text", { x, y: HEIGHT - 8, class: "tick", "text-anchor": "middle" }, text);
    });
  }

  bar(slot, yOf) {
    const base = yOf(0);
    const middle = yOf(slot.freed);
    const top = yOf(slot.freed + slot.shared);
    const gone = slot.entries.filter((entry) => this.marks.doomed.has(entry.checkpoint)).length;
    const chosen = slot.entries.some((entry) => this.marks.selected.includes(entry.checkpoint));
    const width = Math.max(1, slot.width - (slot.width > 8 ? 2 : slot.width > 4 ? 1 : 0));
    const rect = (name, y, height) => svg("rect", { class: name, x: slot.x, y, width, height: Math.max(0, height) });
    return svg(
      "g",
      { class: gone > 0 ? "doomed" : null },
      rect("freed", middle, base - middle),
      rect("shared", top, middle - top),
      rect("rest", yOf(slot.size), top - yOf(slot.size)),
      gone > 0 ? rect("gone", base + 1, 4 * Math.max(0.25, gone / slot.entries.length)) : null,
      chosen ? svg("path", { class: "chosen", d: `M${slot.x + width / 2} ${base + 2}l-5 8h10z` }) : null,
    );
  }

  point(event) {
    const slot = slotAt(this.slots ?? [], event.clientX - this.frame.getBoundingClientRect().left);
    if (slot !== null) this.say(slot);
  }

  pick(event) {
    const slot = slotAt(this.slots ?? [], event.clientX - this.frame.getBoundingClientRect().left);
    if (slot !== null) this.onPick(slot.entries.at(-1));
  }

  say(slot) {
    const several = (this.slots ?? []).some((other) => other.entries.length > 1);
    if (slot === null) {
      const hint = several ? "A bar is the mean of the checkpoints at its place. " : "";
      replace(this.readout, `${hint}Click a bar to find it in the table.`);
      return;
    }
    const one = slot.entries.length === 1 ? "it" : "one";
    const sizes = `${bytes(slot.size)}, of that ${bytes(slot.shared)} shared; removing ${one} frees ${bytes(slot.freed)}`;
    replace(this.readout, h("bdi", null, nameOf(slot)), `: ${sizes}`);
  }
}

function nameOf({ entries }) {
  const steps = entries.map((entry) => entry.step);
  if (entries.length === 1) return `${entries[0].tag.slice(0, 60)}, step ${count(steps[0])}`;
  const range = `steps ${count(Math.min(...steps))} to ${count(Math.max(...steps))}`;
  return `${counted(entries.length, "checkpoint")}, ${range}, each`;
}

function roundSteps(low, high, most) {
  return ticks(low, high, most)
    .filter((step) => Number.isInteger(step))
    .map((step) => ({ at: step, text: short(step) }));
}

function legend(slots) {
  const entry = (name, text) => h("span", { class: "key" }, h("span", { class: `swatch ${name}` }), text);
  return [
    entry("freed", "freed when it is removed"),
    entry("shared", "shared with other checkpoints"),
    slots.some((slot) => slot.size > slot.shared + slot.freed) ? entry("rest", "shared with the run's working files") : null,
  ];
}
