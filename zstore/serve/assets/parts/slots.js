// Where checkpoints stand along an axis, with those that would lie on each other taken together, and the times beside it.

const LEAST_WIDTH = 4;
const MOST_WIDTH = 28;
const TIME_STEPS_S = [1, 5, 15, 60, 300, 900, 3600, 10800, 21600, 43200, 86400, 604800, 2592000, 31536000];

/**
 * @typedef {object} Slot
 * @property {number} x Left edge, in pixels.
 * @property {number} width
 * @property {object[]} entries
 * @property {number[]} indices Of these among all.
 * @property {number} shared Mean of their shared bytes.
 * @property {number} freed Mean of the bytes that removing one would free.
 * @property {number} size Mean of their sizes.
 */

/**
 * @param {object[]} entries Checkpoints.
 * @param {(entry: object) => number} positionOf A step or a time.
 * @param {number} width Of the axis, in pixels.
 * @returns {{slots: Slot[], low: number, high: number}}
 */
export function layOut(entries, positionOf, width) {
  if (entries.length === 0) return { slots: [], low: 0, high: 0 };
  const positions = entries.map(positionOf);
  const low = Math.min(...positions);
  const high = Math.max(...positions);
  const slotWidth = widthOf(positions, high - low, width);
  const room = Math.max(width - slotWidth, 0);
  const number = Math.max(1, Math.floor(room / slotWidth));
  const found = new Map();
  entries.forEach((entry, index) => {
    const share = high > low ? (positions[index] - low) / (high - low) : 0.5;
    const key = slotWidth > LEAST_WIDTH ? share : Math.round(share * number);
    if (!found.has(key)) {
      const x = slotWidth > LEAST_WIDTH ? share * room : (key / number) * room;
      found.set(key, { x, width: slotWidth, entries: [], indices: [] });
    }
    const slot = found.get(key);
    slot.entries.push(entry);
    slot.indices.push(index);
  });
  const slots = [...found.values()];
  for (const slot of slots) {
    slot.shared = mean(slot.entries, (entry) => entry.shared_bytes);
    slot.freed = mean(slot.entries, (entry) => entry.freed_bytes);
    slot.size = mean(slot.entries, (entry) => entry.size_bytes);
  }
  return { slots, low, high };
}

/** The width of a bar: what the closest neighbours leave, within limits. */
function widthOf(positions, spread, width) {
  const sorted = [...new Set(positions)].sort((a, b) => a - b);
  if (sorted.length < 2) return MOST_WIDTH;
  let gap = spread;
  for (let index = 1; index < sorted.length; index++) gap = Math.min(gap, sorted[index] - sorted[index - 1]);
  return Math.max(LEAST_WIDTH, Math.min(MOST_WIDTH, (gap / (spread + gap)) * width));
}

function mean(entries, numberOf) {
  return entries.reduce((sum, entry) => sum + numberOf(entry), 0) / entries.length;
}

/**
 * @param {Slot[]} slots In the order of their places.
 * @param {number} x In pixels.
 * @returns {Slot | null} The closest.
 */
export function slotAt(slots, x) {
  let best = null;
  for (const slot of slots) {
    const distance = Math.abs(slot.x + slot.width / 2 - x);
    if (best === null || distance < best.distance) best = { slot, distance };
  }
  return best?.slot ?? null;
}

/**
 * @param {number} low Seconds since 1970.
 * @param {number} high
 * @param {number} most
 * @returns {{at: number, text: string}[]} Times at round places of this machine's clock.
 */
export function roundTimes(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const step = TIME_STEPS_S.find((size) => size >= raw) ?? TIME_STEPS_S.at(-1);
  const offset = new Date(low * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let number = Math.ceil((low - offset) / step); number * step + offset <= high; number++) {
    const at = number * step + offset;
    found.push({ at, text: timeText(at, step) });
  }
  return found;
}

function timeText(at, step) {
  const date = new Date(at * 1000);
  if (step >= 86400) return date.toLocaleDateString("en-GB", { month: "short", day: "numeric" });
  const parts = { hour: "2-digit", minute: "2-digit", second: step < 60 ? "2-digit" : undefined };
  return date.toLocaleTimeString("en-GB", parts);
}
