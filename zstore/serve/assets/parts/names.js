// Trees of arrays by their names.
//
// A name is `group/rest` or `optimizer/slot/rest`; the rest is split at its dots. A part that holds nothing but another is
// shown as one with it: `transformer.h`, `wte.weight`.

import { fits } from "./filter.js";

const DEEPEST = 16;

/**
 * @typedef {object} Node
 * @property {string} path Prefix of the names below it, its separator last; of an array its name. One of its kind.
 * @property {string} label Its part of the name, below its parent; a group's has its separator last.
 * @property {Node | null} parent
 * @property {Node[]} children In the order of the names; empty for an array.
 * @property {object | null} item The array, null for a group.
 * @property {number} count Arrays in it.
 * @property {number} nbytes Their bytes, 0 where no sizes are given.
 * @property {Record<string, number>} tally Arrays in it by status.
 */

/**
 * @param {string} name Of an array.
 * @returns {string[]} Its parts, each but the last with the separator behind it.
 */
export function partsOf(name) {
  const parts = [];
  let rest = name;
  const slashes = name.startsWith("optimizer/") ? 2 : 1;
  for (let number = 0; number < slashes; number++) {
    const slash = rest.indexOf("/");
    if (slash < 0) break;
    parts.push(rest.slice(0, slash + 1));
    rest = rest.slice(slash + 1);
  }
  while (parts.length < DEEPEST) {
    const dot = rest.indexOf(".");
    if (dot < 0) break;
    parts.push(rest.slice(0, dot + 1));
    rest = rest.slice(dot + 1);
  }
  parts.push(rest);
  return parts;
}

function makeNode(path, label, parent, item = null) {
  return { path, label, parent, children: [], item, count: 0, nbytes: 0, tally: {} };
}

/**
 * @param {object[]} items Arrays, each with a `name`, maybe `nbytes` and a `status`.
 * @returns {Node} The root; it is not shown itself.
 */
export function buildTree(items) {
  const root = makeNode("", "", null);
  const groups = new Map();
  for (const item of items) {
    const parts = partsOf(item.name);
    const last = parts.pop();
    let node = root;
    add(node, item);
    let path = "";
    for (const part of parts) {
      path += part;
      let group = groups.get(path);
      if (group === undefined) {
        group = makeNode(path, part, node);
        groups.set(path, group);
        node.children.push(group);
      }
      node = group;
      add(node, item);
    }
    const leaf = makeNode(item.name, last, node, item);
    add(leaf, item);
    node.children.push(leaf);
  }
  joinChains(root);
  return root;
}

function add(node, item) {
  node.count += 1;
  node.nbytes += item.nbytes ?? 0;
  if (item.status !== undefined) node.tally[item.status] = (node.tally[item.status] ?? 0) + 1;
}

function joinChains(node) {
  node.children = node.children.map(joined);
  for (const child of node.children) {
    child.parent = node;
    joinChains(child);
  }
}

/** Return a node and all that it alone leads to as one; what ends with a slash stays by itself. */
function joined(node) {
  let last = node;
  let label = node.label;
  while (last.children.length === 1 && last.path.endsWith(".")) {
    [last] = last.children;
    label += last.label;
  }
  return last === node ? node : { ...last, label };
}

/**
 * @typedef {object} Row
 * @property {Node} node
 * @property {number} level From 1 on.
 * @property {number} position Among its siblings that are shown, from 1 on.
 * @property {number} siblings
 * @property {boolean | null} open Null for an array.
 */

/**
 * @param {Node} root
 * @param {(node: Node) => boolean} isOpen
 * @param {((node: Node) => boolean) | null} isShown Null: all are.
 * @returns {Row[]} What is shown, in order.
 */
export function rowsOf(root, isOpen, isShown = null) {
  const rows = [];
  const visit = (parent, level) => {
    const children = isShown === null ? parent.children : parent.children.filter(isShown);
    children.forEach((node, index) => {
      const open = node.item === null ? isOpen(node) : null;
      rows.push({ node, level, position: index + 1, siblings: children.length, open });
      if (open) visit(node, level + 1);
    });
  };
  visit(root, 1);
  return rows;
}

/**
 * @param {Node} root
 * @param {string} text Words, all of which a name must hold; case does not count.
 * @returns {Map<Node, {count: number, nbytes: number, tally: Record<string, number>}> | null} The arrays that match and what
 *   they are in, each with its sums over those that match; null for no words.
 */
export function match(root, text) {
  if (text.trim() === "") return null;
  const found = new Map();
  const visit = (node) => {
    let sums = null;
    if (node.item !== null) {
      if (!fits(node.path, text)) return null;
      sums = node;
    }
    for (const child of node.children) {
      const part = visit(child);
      if (part !== null) sums = joinSums(sums, part);
    }
    if (sums !== null) found.set(node, sums);
    return sums;
  };
  visit(root);
  return found;
}

/** Return `sums`, made anew where it is null, with those of a part added. */
function joinSums(sums, { count, nbytes, tally }) {
  const all = sums ?? { count: 0, nbytes: 0, tally: {} };
  all.count += count;
  all.nbytes += nbytes;
  for (const [status, number] of Object.entries(tally)) all.tally[status] = (all.tally[status] ?? 0) + number;
  return all;
}

/**
 * @param {Node} root
 * @param {number} most Rows.
 * @returns {Set<string>} Paths of the groups to open at first: level by level, while no more rows are shown.
 */
export function firstOpen(root, most) {
  const open = new Set();
  let shown = root.children.length;
  let level = root.children;
  while (level.length > 0) {
    const next = [];
    for (const node of level) {
      if (node.item !== null || shown + node.children.length > most) continue;
      open.add(node.path);
      shown += node.children.length;
      next.push(...node.children);
    }
    level = next;
  }
  return open;
}

/**
 * @param {Node} root
 * @param {string} name Of an array.
 * @returns {Node | null}
 */
export function findArray(root, name) {
  let node = root;
  while (node !== undefined) {
    const next = node.children.find((child) => child.item !== null && child.path === name);
    if (next !== undefined) return next;
    node = node.children.find((child) => child.item === null && name.startsWith(child.path));
  }
  return null;
}
