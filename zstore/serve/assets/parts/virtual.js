// Lists of which only the rows in sight are in the document, so that ten thousand scroll as ten do. One row is active: keys
// act on it.

const SPARE_ROWS = 6;
let made = 0;

/** Rows of one height in a box that scrolls. The owner of the list gives the box its height. */
export class VirtualList {
  /**
   * @param {HTMLElement} box It scrolls; rows become children of `body`.
   * @param {HTMLElement} body In the box; it gets the height of all rows.
   * @param {(index: number) => HTMLElement} renderRow
   * @param {() => void} choose Called when a row was clicked, which is active then.
   * @param {(index: number) => void} [onActive] Called when another row became active.
   */
  constructor(box, body, renderRow, choose, onActive = () => {}) {
    Object.assign(this, { box, body, renderRow, onActive, count: 0, active: 0, rowHeight: 0, rows: new Map() });
    this.id = `list-${++made}`;
    body.classList.add("virtual-body");
    box.addEventListener("scroll", () => this.update(), { passive: true });
    box.addEventListener("click", (event) => {
      const row = event.target.closest("[data-index]");
      if (row === null || event.target.closest("a, button") !== null || getSelection().type === "Range") return;
      this.moveTo(Number(row.dataset.index));
      choose();
    });
    this.observer = new ResizeObserver(() => this.measure());
    this.observer.observe(box);
  }

  /** Show `count` rows, all drawn anew, with that of `active`, or the one closest to it, as the active one. */
  show(count, active) {
    this.count = count;
    this.active = Math.max(0, Math.min(active, count - 1));
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.measure();
    this.markActive();
  }

  /** Make a row the active one, the first or last for one beyond them, and bring it in sight; see `reveal`. */
  moveTo(index, middle = false) {
    if (this.count === 0) return;
    this.rows.get(this.active)?.classList.remove("active");
    this.active = Math.min(Math.max(index, 0), this.count - 1);
    this.reveal(this.active, middle);
    this.markActive();
    this.onActive(this.active);
  }

  /** What keys do that move, by their names. */
  get moves() {
    return {
      ArrowDown: () => this.moveTo(this.active + 1),
      ArrowUp: () => this.moveTo(this.active - 1),
      Home: () => this.moveTo(0),
      End: () => this.moveTo(this.count - 1),
      PageDown: () => this.moveTo(this.active + this.pageRows),
      PageUp: () => this.moveTo(this.active - this.pageRows),
    };
  }

  /** Draw the rows in sight anew. */
  redraw() {
    for (const [index, row] of this.rows) {
      const fresh = this.place(index);
      row.replaceWith(fresh);
      this.rows.set(index, fresh);
    }
  }

  /** Scroll so that a row is in sight; with `middle` to the middle of the box, where it was not. */
  reveal(index, middle = false) {
    if (this.rowHeight === 0) return;
    const top = index * this.rowHeight;
    const room = this.box.clientHeight - this.body.offsetTop;
    const last = top + this.rowHeight - room;
    const { scrollTop } = this.box;
    if (top < scrollTop || last > scrollTop) {
      this.box.scrollTop = middle ? top - room / 2 : top < scrollTop ? top : last;
    }
    this.update();
  }

  /** How many rows fit into the box. */
  get pageRows() {
    return Math.max(1, Math.floor((this.box.clientHeight - this.body.offsetTop) / (this.rowHeight || 1)) - 1);
  }

  /** Mark the active row, of which the box, that has the focus, tells by its id. */
  markActive() {
    const row = this.rows.get(this.active);
    row?.classList.add("active");
    if (row === undefined) this.box.removeAttribute("aria-activedescendant");
    else this.box.setAttribute("aria-activedescendant", row.id);
  }

  close() {
    this.observer.disconnect();
  }

  measure() {
    const height = parseFloat(getComputedStyle(this.box).getPropertyValue("--row-height")) || 28;
    if (height !== this.rowHeight) {
      this.rowHeight = height;
      for (const row of this.rows.values()) row.remove();
      this.rows.clear();
    }
    this.body.style.height = `${this.count * height}px`;
    this.update();
  }

  update() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - SPARE_ROWS);
    const shown = Math.ceil(this.box.clientHeight / this.rowHeight) + 2 * SPARE_ROWS;
    const stop = Math.min(this.count, first + shown);
    for (const [index, row] of this.rows) {
      if (index < first || index >= stop) {
        row.remove();
        this.rows.delete(index);
      }
    }
    const added = document.createDocumentFragment();
    for (let index = first; index < stop; index++) {
      if (this.rows.has(index)) continue;
      const row = this.place(index);
      this.rows.set(index, row);
      added.append(row);
    }
    this.body.append(added);
  }

  place(index) {
    const row = this.renderRow(index);
    row.id = `${this.id}-${index}`;
    row.dataset.index = index;
    row.classList.add("virtual-row");
    row.classList.toggle("active", index === this.active);
    row.style.top = `${index * this.rowHeight}px`;
    return row;
  }
}
