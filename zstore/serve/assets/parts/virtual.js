// Lists of which only the rows in sight are in the document, so that ten thousand scroll as ten do.

const SPARE_ROWS = 6;

/** Rows of one height in a box that scrolls. The owner of the list gives the box its height. */
export class VirtualList {
  /**
   * @param {HTMLElement} box It scrolls; rows become children of `body`.
   * @param {HTMLElement} body In the box; it gets the height of all rows.
   * @param {(index: number) => HTMLElement} renderRow
   */
  constructor(box, body, renderRow) {
    this.box = box;
    this.body = body;
    this.renderRow = renderRow;
    this.count = 0;
    this.rowHeight = 0;
    this.rows = new Map();
    body.classList.add("virtual-body");
    box.addEventListener("scroll", () => this.update(), { passive: true });
    this.observer = new ResizeObserver(() => this.measure());
    this.observer.observe(box);
  }

  /** Show `count` rows, all drawn anew. */
  show(count) {
    this.count = count;
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.measure();
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

  /** The row's element where it is in the document. */
  element(index) {
    return this.rows.get(index) ?? null;
  }

  /** Mark a row as the active one of `owner`, which has the focus and tells of it by the row's id. */
  markActive(owner, index) {
    const row = this.element(index);
    row?.classList.add("active");
    if (row === null) owner.removeAttribute("aria-activedescendant");
    else owner.setAttribute("aria-activedescendant", row.id);
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
    row.classList.add("virtual-row");
    row.style.top = `${index * this.rowHeight}px`;
    return row;
  }
}
