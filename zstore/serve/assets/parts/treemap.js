// The map of memory: tiers, in them kinds of state, in these arrays, each as large as its bytes. Drawn on a canvas, so that
// ten thousand arrays are drawn in one go; what is pointed at, or reached by keys, is said in words beside it.

import { atFrame, h } from "../dom.js";
import { bytes, counted, percent } from "../format.js";
import { colour, onTheme } from "../themes.js";
import { treemapSquarify } from "../vendor/d3-hierarchy.js";

const TITLE_PX = 20;
const LEAST_TITLE = 46;
const LINE_PX = 14;
const GAP = 3;
const NUM_COLOURS = 8;
const HELP = "Arrow keys move to the next array in that direction, Home to the largest; Enter zooms into its group, Escape shows everything.";

/** The map. `reached(array)` is called with the array that is pointed at, or null. */
export class Treemap {
  constructor({ tree, colours, reached }) {
    Object.assign(this, { tree, colours, reached, leaves: [], titles: [], active: null, matches: null, focus: null });
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.mark = h("div", { class: "map-mark", hidden: true });
    this.plot = h(
      "div",
      { class: "map", tabindex: "0", role: "application", "aria-roledescription": "map of memory", "aria-label": this.summary(), "aria-description": HELP, test: "treemap" },
      this.canvas,
      this.mark,
    );
    this.path = h("div", { class: "row map-path" });
    this.said = h("p", { class: "map-said", role: "status", test: "treemap-readout" });
    this.element = h("div", { class: "map-whole" }, this.path, this.plot, this.said);
    this.draw = atFrame(() => this.drawNow());
    this.listen();
    this.showPath();
    this.say();
  }

  summary() {
    const parts = this.tree.map((tier) => `${tier.name} ${bytes(tier.nbytes)}`);
    return `Where bytes rest: ${parts.join(", ")}`;
  }

  /** Show only what lies in `node`, a tier or kind of the tree; null: all. */
  show(node) {
    this.focus = node;
    this.showPath();
    this.layOut();
    this.reach(null);
  }

  /** Dim the arrays of which `matches` is false; null: none. */
  filter(matches) {
    this.matches = matches;
    this.draw();
  }

  /** Point at an array, from elsewhere. */
  reach(array, tell = true) {
    const leaf = array === null ? null : (this.leaves.find((one) => one.array === array) ?? null);
    this.active = leaf;
    this.mark.hidden = leaf === null;
    if (leaf !== null) {
      const { x, y, width, height } = leaf.box;
      Object.assign(this.mark.style, { left: `${x}px`, top: `${y}px`, width: `${Math.max(3, width)}px`, height: `${Math.max(3, height)}px` });
    }
    this.say();
    if (tell) this.reached(leaf?.array ?? null);
  }

  say() {
    const whole = this.total();
    if (this.active === null) {
      this.said.textContent = this.focus === null ? "Point at an array, or tap it, to read about it here." : `${counted(this.leaves.length, "array")}, ${bytes(whole)}`;
      return;
    }
    const { name, kind, tier, nbytes } = this.active.array;
    this.said.textContent = `${name}: ${bytes(nbytes)}, ${kind} on ${tier}, ${percent(nbytes / whole)} of what is shown`;
  }

  total() {
    return this.shown().reduce((sum, node) => sum + node.nbytes, 0);
  }

  shown() {
    return this.focus === null ? this.tree : [this.focus];
  }

  showPath() {
    const step = (text, node) =>
      h("button", { type: "button", class: "small", "aria-pressed": String(this.focus === node), onclick: () => this.show(node) }, text);
    const tier = this.focus?.tier;
    this.path.replaceChildren(
      step("All tiers", null),
      ...this.tree.map((node) => step(`${node.name} ${bytes(node.nbytes)}`, node)),
      ...(this.focus?.kind === undefined ? [] : [step(`${this.focus.name} on ${tier}`, this.focus)]),
    );
  }

  layOut() {
    const { width, height } = this;
    if (!width) return;
    this.leaves = [];
    this.titles = [];
    this.shared = new Map();
    this.place(this.shown(), { x: 0, y: 0, width, height }, 0);
    this.draw();
  }

  place(nodes, box, depth) {
    const children = nodes.map((node) => ({ node, value: node.nbytes })).sort((a, b) => b.value - a.value);
    const value = children.reduce((sum, child) => sum + child.value, 0);
    treemapSquarify({ value, children }, box.x, box.y, box.x + box.width, box.y + box.height);
    for (const { node, x0, y0, x1, y1 } of children) {
      const own = { x: x0, y: y0, width: x1 - x0, height: y1 - y0 };
      if (node.children === undefined) {
        this.leaves.push({ array: node, box: own });
        continue;
      }
      const outer = shrink(own, depth === 0 ? GAP : 1);
      if (node.kind !== undefined) this.shared.set(node.tier + node.kind, sharedPrefix(node.children));
      const titled = outer.width >= LEAST_TITLE && outer.height >= LEAST_TITLE;
      if (titled) this.titles.push({ node, box: { ...outer, height: TITLE_PX } });
      const inner = titled ? { ...outer, y: outer.y + TITLE_PX, height: outer.height - TITLE_PX } : outer;
      this.place(node.children, inner, depth + 1);
    }
  }

  drawNow() {
    const { width, height, canvas } = this;
    if (!width) return;
    const density = devicePixelRatio || 1;
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(density, density);
    pen.textBaseline = "middle";
    this.drawLeaves(pen);
    this.drawTitles(pen);
  }

  drawLeaves(pen) {
    const fills = Array.from({ length: NUM_COLOURS }, (_, index) => colour(`series-${index}`, 0.38, "var(--surface)"));
    const dim = colour("sunken");
    const text = colour("text");
    const font = getComputedStyle(this.plot).fontFamily;
    pen.font = `11px ${font}`;
    for (const { array, box } of this.leaves) {
      const gap = box.width > 6 && box.height > 6 ? 1 : Math.min(box.width, box.height) > 2 ? 0.5 : 0;
      pen.fillStyle = this.matches === null || this.matches(array) ? fills[this.colours.get(array.kind) ?? 0] : dim;
      pen.fillRect(box.x, box.y, Math.max(0.3, box.width - gap), Math.max(0.3, box.height - gap));
      if (box.width < 54 || box.height < 18) continue;
      pen.fillStyle = text;
      label(pen, array, box, this.shared);
    }
  }

  drawTitles(pen) {
    const text = colour("text");
    const font = getComputedStyle(this.plot).fontFamily;
    for (const { node, box } of this.titles) {
      pen.font = `${node.kind === undefined ? "600 " : ""}12px ${font}`;
      pen.fillStyle = text;
      const size = ` ${bytes(node.nbytes)}`;
      const name = fitted(pen, node.name, box.width - 8 - pen.measureText(size).width);
      pen.fillText(name ? name + size : fitted(pen, node.name, box.width - 8), box.x + 4, box.y + TITLE_PX / 2 + 1);
    }
  }

  listen() {
    this.observer = new ResizeObserver(([entry]) => {
      const { width, height } = entry.contentRect;
      Object.assign(this, { width: Math.floor(width), height: Math.floor(height) });
      this.layOut();
      this.reach(null);
    });
    this.observer.observe(this.plot);
    this.unfollow = onTheme(this.draw);
    const place = (event) => {
      const edge = this.plot.getBoundingClientRect();
      return [event.clientX - edge.left, event.clientY - edge.top];
    };
    this.plot.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      const leaf = this.leafAt(x, y);
      this.plot.classList.toggle("on-title", this.titleAt(x, y) !== null);
      if (leaf !== this.active) this.reach(leaf?.array ?? null);
    });
    this.plot.addEventListener("click", (event) => {
      const title = this.titleAt(...place(event));
      if (title !== null) this.show(title.node === this.focus ? null : title.node);
    });
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.leaves.length === 0) return;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves) this.reach(this.neighbour(...moves[event.key]).array);
    else if (event.key === "Home") this.reach(this.largest().array);
    else if (event.key === "Enter" && this.active !== null) this.show(this.kindOf(this.active.array));
    else if (event.key === "Escape" && this.focus !== null) this.show(null);
    else return;
    event.preventDefault();
  }

  largest() {
    return this.leaves.reduce((most, leaf) => (leaf.array.nbytes > most.array.nbytes ? leaf : most));
  }

  kindOf({ tier, kind }) {
    return this.tree.find((node) => node.name === tier).children.find((node) => node.kind === kind);
  }

  /** Return the leaf that comes next in a direction: of those ahead the closest, those beside the way counting as farther. */
  neighbour(dx, dy) {
    if (this.active === null) return this.largest();
    const [x, y] = middle(this.active.box);
    let best = { leaf: this.active, far: Infinity };
    for (const leaf of this.leaves) {
      const [u, v] = middle(leaf.box);
      const ahead = (u - x) * dx + (v - y) * dy;
      if (ahead <= 0.5 || leaf === this.active) continue;
      const far = ahead + 3 * Math.abs((u - x) * dy + (v - y) * dx);
      if (far < best.far) best = { leaf, far };
    }
    return best.leaf;
  }

  leafAt(x, y) {
    return this.leaves.find(({ box }) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height) ?? null;
  }

  titleAt(x, y) {
    return this.titles.findLast(({ box }) => x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height) ?? null;
  }

  close() {
    this.observer.disconnect();
    this.unfollow();
  }
}

function middle({ x, y, width, height }) {
  return [x + width / 2, y + height / 2];
}

function shrink({ x, y, width, height }, by) {
  return { x: x + by / 2, y: y + by / 2, width: Math.max(0, width - by), height: Math.max(0, height - by) };
}

/** Write the name of an array, without what all of its kind begin with, over as many lines as there is room, and its size if it fits. */
function label(pen, array, box, shared) {
  const room = box.width - 9;
  const lines = Math.floor((box.height - 4) / LINE_PX);
  const name = array.name.slice(shared.get(array.tier + array.kind) ?? 0) || array.name;
  const wrapped = wrap(pen, name, room);
  const size = bytes(array.nbytes);
  const hasSize = lines > 1 && pen.measureText(size).width <= room;
  const forName = hasSize ? lines - 1 : lines;
  const shown = wrapped.slice(0, forName);
  if (wrapped.length > forName) shown[forName - 1] = fitted(pen, wrapped.slice(forName - 1).join(""), room);
  if (hasSize) shown.push(size);
  for (const [index, line] of shown.entries()) pen.fillText(line, box.x + 5, box.y + 10 + index * LINE_PX);
}

/** Return `text` in lines that are no wider than `room`, broken after dots and slashes where that is possible. */
function wrap(pen, text, room) {
  const lines = [""];
  for (const part of text.split(/(?<=[./])/)) {
    if (pen.measureText(lines.at(-1) + part).width <= room) {
      lines[lines.length - 1] += part;
    } else if (lines.at(-1) === "") {
      lines[lines.length - 1] = part;
    } else {
      lines.push(part);
    }
  }
  return lines.map((line) => fitted(pen, line, room));
}

/** Return `text`, cut in its middle where it is wider than `room`; nothing where there is no room for any of it. */
function fitted(pen, text, room) {
  const { width } = pen.measureText(text);
  if (width <= room) return text;
  for (let kept = Math.floor((text.length * room) / width) - 1; kept > 2; kept--) {
    const cut = `${text.slice(0, Math.ceil(kept / 2))}…${text.slice(text.length - Math.floor(kept / 2))}`;
    if (pen.measureText(cut).width <= room) return cut;
  }
  return "";
}

/** Return how much of their names all arrays begin with, up to a slash. */
function sharedPrefix(arrays) {
  const first = arrays[0].name;
  let length = arrays.length > 1 ? first.length : 0;
  for (const { name } of arrays) {
    while (!name.startsWith(first.slice(0, length))) length -= 1;
  }
  return first.slice(0, length).lastIndexOf("/") + 1;
}
