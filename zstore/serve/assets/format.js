// Numbers, sizes and times as people read them. Null, and what is not a number, is a dash.

export const NOTHING = "–";

const UNITS = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
];
const COUNTS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Decimal units, as `zstore` prints them: 1304000000 is "1.30 GB". */
export function bytes(value, digits = 3) {
  if (!known(value)) return NOTHING;
  for (const [size, unit] of UNITS) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(digits - 1)} ${unit}`;
  }
  return `${value.toFixed(0)} bytes`;
}

/** Bytes per second. */
export function rate(value, digits = 3) {
  return known(value) ? `${bytes(value, digits).replace(" bytes", " B")}/s` : NOTHING;
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
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 2).replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: Math.max(0, digits - 4) });
  if (size < 0.1 || Number.isInteger(value)) return String(Number(value.toPrecision(digits)));
  return value.toPrecision(digits);
}

/** A number short enough for an axis: 12k, 1.5M, 1.5e-5. */
export function short(value, digits = 3) {
  if (!known(value)) return NOTHING;
  for (const [size, unit] of COUNTS) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(digits))}${unit}`;
  }
  const rounded = Number(value.toPrecision(digits));
  return value !== 0 && Math.abs(value) < 1e-3 ? rounded.toExponential() : String(rounded);
}

/** Texts for ticks in as many digits as they have and as tell them apart, by `text(value, digits)`; a tick that is null has none. */
export function labels(values, text) {
  const isWhole = (value, digits) => value === null || Math.abs(value - value.toPrecision(digits)) <= 1e-9 * Math.abs(value);
  for (let digits = 3; ; digits++) {
    const found = values.map((value) => (value === null ? null : text(value, digits)));
    const isTold = new Set(found).size === new Set(values).size && values.every((value) => isWhole(value, digits));
    if (digits === 12 || isTold) return found;
  }
}

/** A length of time given in seconds. */
export function duration(seconds, digits = 3) {
  if (!known(seconds)) return NOTHING;
  if (seconds === 0) return "0 s";
  if (seconds < 0) return `-${duration(-seconds, digits)}`;
  if (seconds < 1e-3) return `${Number((seconds * 1e6).toPrecision(digits))} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(digits))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(digits))} s`;
  if (digits > 3) return `${Number(seconds.toPrecision(digits))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A share from 0 to 1 as a percentage. */
export function percent(share, digits = 3) {
  if (!known(share)) return NOTHING;
  if (share > 0 && share < 0.001 && digits === 3) return "<0.1 %";
  return `${(share * 100).toFixed(digits - (Math.abs(share) < 0.1 ? 2 : 3))} %`;
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

/** A time as date and clock of this machine's zone. */
export function when(at) {
  if (!known(at)) return NOTHING;
  const date = new Date(at * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`
  );
}

/** The zone of the times that `when` writes: UTC+2, UTC-3:30. */
export function zone(at = Date.now() / 1000) {
  const minutes = -new Date(at * 1000).getTimezoneOffset();
  if (minutes === 0) return "UTC";
  const [hours, rest] = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60];
  return `UTC${minutes < 0 ? "-" : "+"}${hours}${rest === 0 ? "" : `:${String(rest).padStart(2, "0")}`}`;
}

/** The shape of an array: [128, 64]. */
export function shape(sizes) {
  return `[${sizes.join(", ")}]`;
}
