// Where numbers lie on an axis, and which of them are written beside it.

/** Return about `wanted` round numbers from `low` to `high`. */
export function ticks(low, high, wanted = 5) {
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => rough <= factor * power) * power;
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

/** Return texts for ticks in as many digits as tell them apart; `text(value, digits)` writes one. */
export function labels(values, text) {
  for (let digits = 3; ; digits++) {
    const found = values.map((value) => text(value, digits));
    if (digits === 12 || new Set(found).size === found.length) return found;
  }
}

/** Return round numbers for a logarithmic axis: powers of ten, and 2 and 5 times them where there is room. */
export function logTicks(low, high, wanted = 5) {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / (wanted + 1)));
  const factors = to - from <= wanted / 2 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = from; power <= to; power += every) {
    for (const factor of factors) found.push(factor * 10 ** power);
  }
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length >= 2 ? inside : ticks(low, high, wanted);
}

/**
 * Return `{low, high, log, to, from, ticks}`: `to` maps a value to a place from `start` to `end`, `from` the other way.
 * Without a span, or with a logarithm of what is not positive, it is a linear scale around the value.
 */
export function scale(low, high, start, end, { log = false, wanted = 5 } = {}) {
  const logarithmic = log && low > 0;
  let [least, most] = [low, high];
  if (!(most > least)) {
    const margin = Math.abs(least) * 0.05 || 1;
    [least, most] = logarithmic ? [least / 1.1, least * 1.1] : [least - margin, least + margin];
  }
  const turn = logarithmic ? Math.log10 : (value) => value;
  const back = logarithmic ? (value) => 10 ** value : (value) => value;
  const [a, b] = [turn(least), turn(most)];
  return {
    low: least,
    high: most,
    log: logarithmic,
    to: (value) => start + ((turn(value) - a) / (b - a)) * (end - start),
    from: (place) => back(a + ((place - start) / (end - start)) * (b - a)),
    ticks: logarithmic ? logTicks(least, most, wanted) : ticks(least, most, wanted),
  };
}

/** Return the index of the number in ascending `values` that is nearest to `value`; -1 where there is none. */
export function nearest(values, value) {
  if (values.length === 0) return -1;
  const after = firstFrom(values, value);
  if (after === 0) return 0;
  if (after === values.length) return values.length - 1;
  return value - values[after - 1] <= values[after] - value ? after - 1 : after;
}

/** Return the index of the first number in ascending `values` that is at least `value`. */
export function firstFrom(values, value) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the least and the largest of all numbers in `lists` from index `first` to before `last`, null where there is none. */
export function extent(lists, first, last, { positive = false } = {}) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of lists) {
    for (let index = first; index < last; index++) {
      const value = values[index];
      if (value === null || value === undefined || (positive && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}
