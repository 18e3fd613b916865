// Numbers, sizes and times as people read them. Null, and what is not a number, is a dash.

export const NOTHING = "–";

const UNITS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

const known = (value) => typeof value === "number" && Number.isFinite(value);
const rounded = (value, digits) => Number(value.toPrecision(digits));

/** Decimal units, as `zstore` prints them: 1304000000 is "1.30 GB". */
export function bytes(value) {
  if (!known(value)) return NOTHING;
  for (const [size, unit] of UNITS) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(2)} ${unit}B`;
  }
  return `${value.toFixed(0)} bytes`;
}

/** Bytes per second. */
export function rate(value) {
  return known(value) ? `${bytes(value).replace(" bytes", " B")}/s` : NOTHING;
}

/** An integer with separators: 1,024. */
export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NOTHING;
}

/** "1 rank", "1,024 ranks". */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Any number in about `digits` significant digits. */
export function number(value, digits = 4) {
  if (!known(value)) return NOTHING;
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(digits - 2).replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: Math.max(0, digits - 4) });
  if (size < 0.1 || Number.isInteger(value)) return String(rounded(value, digits));
  return value.toPrecision(digits);
}

/** A number short enough for an axis: 12k, 1.5M, 1.5e-5. */
export function short(value, digits = 3) {
  if (!known(value)) return NOTHING;
  for (const [size, unit] of UNITS) {
    if (Math.abs(value) >= size) return `${rounded(value / size, digits)}${unit}`;
  }
  return value !== 0 && Math.abs(value) < 1e-3
    ? rounded(value, digits).toExponential()
    : String(rounded(value, digits));
}

/** A length of time given in seconds. */
export function duration(seconds, digits = 3) {
  if (!known(seconds)) return NOTHING;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${rounded(seconds * 1e6, digits)} µs`;
  if (seconds < 1) return `${rounded(seconds * 1e3, digits)} ms`;
  if (seconds < 60) return `${rounded(seconds, digits)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A share from 0 to 1 as a percentage. */
export function percent(share) {
  if (!known(share)) return NOTHING;
  return `${(share * 100).toFixed(Math.abs(share) < 0.1 ? 1 : 0)} %`;
}

/** How long ago a time was, in one unit. */
export function ago(at, now = Date.now() / 1000) {
  if (!known(at)) return NOTHING;
  const seconds = Math.max(0, now - at);
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} days ago`;
}

/** A time as date and clock of this machine's zone: 2026-01-31 17:05:00. */
export function when(at) {
  return known(at) ? new Date(at * 1000).toLocaleString("sv-SE") : NOTHING;
}

/** The shape of an array: [128, 64]. */
export function shape(sizes) {
  return `[${sizes.join(", ")}]`;
}

/** Return the texts of ticks by `text(value, digits)`, in as many digits as tell them apart; null has none. */
export function ticks(values, text) {
  const find = (digits) => values.map((value) => (value === null ? null : text(value, digits)));
  for (let digits = 3; digits < 12; digits++) {
    const found = find(digits);
    if (new Set(found).size === new Set(values).size) return found;
  }
  return find(12);
}
