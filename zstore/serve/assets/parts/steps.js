// The steps of a run as columns of numbers, to which live ones are added. Pure.

/** Columns over ascending steps; what is not known is null. A row stands for one step or several that follow each other. */
export class StepColumns {
  constructor(columns = {}) {
    this.columns = { step: [], ...columns };
  }

  get length() {
    return this.columns.step.length;
  }

  get last() {
    return this.length === 0 ? null : this.columns.step[this.length - 1];
  }

  /** Return the values of a column, null for each step where there is none of that name. */
  column(name) {
    return this.columns[name] ?? new Array(this.length).fill(null);
  }

  /** Return the names of the columns that begin with `prefix` and have a value other than zero. */
  named(prefix) {
    return Object.keys(this.columns)
      .filter((name) => name.startsWith(prefix) && this.columns[name].some((value) => value !== null && value !== 0))
      .sort();
  }

  /** Return whether any of the columns has a value. */
  has(...names) {
    return names.some((name) => this.columns[name]?.some((value) => value !== null));
  }

  /** Add columns of later steps. Where they begin at a step that is there, a run took it again: the old ones go. */
  append(columns) {
    const added = columns.step?.length ?? 0;
    if (added === 0) return;
    const kept = firstFrom(this.columns.step, columns.step[0]);
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(columns)])) {
      const old = (this.columns[name] ?? new Array(kept).fill(null)).slice(0, kept);
      this.columns[name] = old.concat(columns[name] ?? new Array(added).fill(null));
    }
  }

  /** Return the columns of the steps after `step`. */
  after(step) {
    const first = step === null ? 0 : firstFrom(this.columns.step, step + 1);
    return Object.fromEntries(Object.entries(this.columns).map(([name, values]) => [name, values.slice(first)]));
  }

  /** Return whether every step between two is a row of its own. */
  isWhole(from, to) {
    const first = firstFrom(this.columns.step, from);
    const last = firstFrom(this.columns.step, to) - 1;
    return last <= first || this.columns.step[last] - this.columns.step[first] === last - first;
  }
}

/** The steps of a run: those that were asked for, and live ones after them. */
export class LiveSteps {
  constructor(columns) {
    this.base = new StepColumns(columns);
    this.live = new StepColumns();
  }

  /** Add live rows. */
  append(columns) {
    this.live.append(columns);
    const first = this.live.columns.step[0];
    if (first !== undefined && this.base.last !== null && first <= this.base.last) {
      const kept = firstFrom(this.base.columns.step, first);
      this.base = new StepColumns(Object.fromEntries(Object.entries(this.base.columns).map(([name, values]) => [name, values.slice(0, kept)])));
    }
  }

  /** The newest rows, each of one step where live ones came. */
  get newest() {
    return this.live.length > 0 ? this.live : this.base;
  }

  /** Return all rows as one. */
  all() {
    const found = new StepColumns({ ...this.base.columns });
    found.append(this.live.columns);
    return found;
  }
}

/** Return the index of the first number in ascending `values` that is at least `value`. */
function firstFrom(values, value) {
  const found = values.findIndex((other) => other >= value);
  return found < 0 ? values.length : found;
}
