// A plot by uPlot: as wide as its place, in the colours of the page, and read by mouse and finger.

import { labels } from "./format.js";
import { colour, onTheme } from "./themes.js";
import { default as uPlot } from "./vendor/uPlot.js";

const ROUND = Array.from({ length: 30 }, (_, index) => [1, 2, 5].map((factor) => Number(`${factor}e${index - 14}`))).flat();
/** Distances of ticks on an axis of whole numbers. */
export const WHOLE = ROUND.filter((distance) => distance >= 1);

const FONT = "11px system-ui, sans-serif";

/** What draws bars: see uPlot. */
export const bars = uPlot.paths.bars;

/** Options of a plot of bars, which are read and picked, and not zoomed. */
export const BARS = { cursor: { x: false, points: { show: false }, drag: { x: false, click: () => {} } } };

/** uPlot listens to mice; these make it listen to fingers too. */
const BIND = {
  mousedown: (_, target, start) => void target.addEventListener("pointerdown", (event) => event.button === 0 && start(event)),
  mousemove: (_, target, move) => {
    target.addEventListener("pointermove", move);
    return move; // A finger that taps comes as a mouse that moves.
  },
  mouseup: (_, target, end) => {
    const ended = new AbortController();
    const once = (event) => {
      ended.abort();
      end(event);
    };
    for (const name of ["pointerup", "pointercancel"]) target.addEventListener(name, once, { signal: ended.signal });
  },
};

/** A plot in `host`, made by `make(width)`, which returns options of uPlot with `data` among them, or null for none. */
export class Plot {
  constructor(host, make) {
    Object.assign(this, { host, make, chart: null });
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(host);
    this.endTheme = onTheme(() => this.draw());
  }

  /** Make it anew. */
  draw() {
    const width = this.host.clientWidth;
    if (width === 0) return;
    this.chart?.destroy();
    const made = this.make(width);
    const fixed = { width, legend: { show: false }, padding: [10, 12, 0, 0] };
    const cursor = { y: false, ...made?.cursor, bind: { ...BIND, ...made?.cursor?.bind } };
    this.chart = made && new uPlot({ ...fixed, ...made, cursor }, made.data, this.host);
  }

  close() {
    this.chart?.destroy();
    this.observer.disconnect();
    this.endTheme();
  }
}

/** Return an axis, of which `text(value, digits)` writes the ticks. */
export function axis(label, text, options) {
  return {
    label,
    font: FONT,
    labelFont: FONT,
    labelSize: 16,
    stroke: colour("muted"),
    grid: { stroke: colour("line"), width: 1, filter: ({ scales }, values) => values.map((value) => (value > scales.y.min ? value : null)) },
    ticks: { show: false },
    values: (_, values) => labels(values, text),
    ...options,
  };
}

/** Options of a logarithmic scale, which has no margin, and of its axis. */
export const LOG = {
  scale: { distr: 3, range: (_, low, high) => (low === null ? [null, null] : [low / 1.01, high * 1.01]) },
  axis: { splits: (_, index, low, high) => logTicks(low, high), filter: (_, values) => values },
};

/** Return round numbers from `low` to `high`: powers of ten, and 2 and 5 times them if there is room; of less than a decade any. */
function logTicks(low, high) {
  if (high < low * 10) {
    const distance = ROUND.find((size) => high - low <= 5 * size);
    const first = Math.ceil(low / distance);
    return Array.from({ length: Math.floor(high / distance) - first + 1 }, (_, index) => (first + index) * distance);
  }
  const factors = high < low * 1000 ? /^[125]/ : /^1/;
  return ROUND.filter((value) => value >= low && value <= high && factors.test(value.toExponential()));
}

/** Return an axis of x, as `axis` does, with a line in the place of a grid. */
export function baseAxis(label, text, options) {
  const border = { show: true, stroke: colour("line-strong"), width: 1 };
  return axis(label, text, { size: 20, space: 60, grid: { show: false }, border, ...options });
}

/** Draw upright lines at `marks`, each `{x, stroke, width, dash, height}`: all of the plot's height, or that of so many pixels. */
export function drawUpright({ ctx, bbox, scales, valToPos }, marks) {
  const bottom = bbox.top + bbox.height;
  ctx.save();
  for (const { x, stroke, width = 1, dash = [], height } of marks) {
    if (x < scales.x.min || x > scales.x.max) continue;
    const at = Math.round(valToPos(x, "x", true));
    ctx.strokeStyle = stroke;
    ctx.lineWidth = width * uPlot.pxRatio;
    ctx.setLineDash(dash.map((length) => length * uPlot.pxRatio));
    ctx.beginPath();
    ctx.moveTo(at, height === undefined ? bbox.top : bottom - height * uPlot.pxRatio);
    ctx.lineTo(at, bottom);
    ctx.stroke();
  }
  ctx.restore();
}
