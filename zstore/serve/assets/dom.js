// Elements made of text nodes only: nothing that comes from data is ever parsed as HTML.

/**
 * Return an element. `attributes`: `on*` functions become listeners, `style` is an object of CSS properties, `test` becomes
 * `data-test`, `true` an empty attribute; null and false are left out. Children are nodes, text, numbers, or lists of them.
 */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) set(element, name, value);
  element.append(...nodes(children));
  return element;
}

/** Return a row that begins with a title, and has `rest` at its end. */
export function titled(title, ...rest) {
  return h("div", { class: "row" }, title, h("span", { class: "spring" }), rest);
}

/** Put `children` into `container` in place of what it held. */
export function replace(container, ...children) {
  container.replaceChildren(...nodes(children));
  return container;
}

/** Return a function that calls `work` at the next frame, once however often it was asked. */
export function atFrame(work) {
  let frame = 0;
  return () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      work();
    });
  };
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (typeof value === "function" && name.startsWith("on")) {
    element.addEventListener(name.slice(2).toLowerCase(), value);
  } else if (name === "style") {
    for (const [property, text] of Object.entries(value)) element.style.setProperty(property, String(text));
  } else if (name === "test") {
    element.dataset.test = value;
  } else if (name === "href" && !/^(#|zarr\/|weights\/)/.test(value)) {
    throw new Error(`links lead to places of this page, got ${value}`);
  } else {
    element.setAttribute(name, value === true ? "" : String(value));
  }
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}
