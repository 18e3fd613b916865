// Times beside an axis.

const TIME_STEPS_S = [1, 5, 15, 60, 300, 900, 3600, 10800, 21600, 43200, 86400, 604800, 2592000, 31536000];

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
