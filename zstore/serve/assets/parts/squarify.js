// A map of weights: rectangles whose areas are as the weights, as square as can be. Pure.

/**
 * Lay `items` out in `box`, the largest first. Returns a rectangle `{x, y, width, height}` for each item, in their order.
 * @param {number[]} weights not negative
 * @param {{x: number, y: number, width: number, height: number}} box
 */
export function squarify(weights, box) {
  const order = weights.map((_, index) => index).sort((a, b) => weights[b] - weights[a]);
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const found = weights.map(() => ({ x: box.x, y: box.y, width: 0, height: 0 }));
  if (!(total > 0) || !(box.width > 0) || !(box.height > 0)) return found;
  const scale = (box.width * box.height) / total;
  let { x, y, width, height } = box;
  let next = 0;
  while (next < order.length && weights[order[next]] > 0) {
    const side = Math.min(width, height);
    const last = rowEnd(order, weights, next, side, scale);
    let area = 0;
    for (let index = next; index < last; index++) area += weights[order[index]] * scale;
    const depth = Math.min(area / side, Math.max(width, height));
    let place = width >= height ? y : x;
    for (let index = next; index < last; index++) {
      const length = depth > 0 ? (weights[order[index]] * scale) / depth : 0;
      found[order[index]] =
        width >= height ? { x, y: place, width: depth, height: length } : { x: place, y, width: length, height: depth };
      place += length;
    }
    if (width >= height) [x, width] = [x + depth, Math.max(0, width - depth)];
    else [y, height] = [y + depth, Math.max(0, height - depth)];
    next = last;
    if (Math.min(width, height) <= 0) break;
  }
  return found;
}

/** Return where the row that begins at `first` ends: before the item that would make its rectangles longer. */
function rowEnd(order, weights, first, side, scale) {
  let area = 0;
  let worst = Infinity;
  const largest = weights[order[first]] * scale;
  let last = first;
  for (; last < order.length; last++) {
    const size = weights[order[last]] * scale;
    if (!(size > 0)) break;
    const sum = area + size;
    const ratio = Math.max((side * side * largest) / (sum * sum), (sum * sum) / (side * side * size));
    if (last > first && ratio > worst) break;
    worst = ratio;
    area = sum;
  }
  return last;
}
