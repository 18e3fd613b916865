// The switch between light and dark; without a choice the page goes by the system.

import { h, replace } from "./dom.js";

const KEY = "zstore-theme";
const ORDER = ["system", "light", "dark"];
const NAMES = { system: "auto", light: "light", dark: "dark" };

/** A button that goes on to the next theme. */
export function themeSwitch() {
  const button = h("button", { type: "button", class: "quiet", test: "theme" });
  const label = () => {
    replace(button, "◐ ", h("span", { class: "wide-only" }, "Theme: "), NAMES[theme()]);
    button.setAttribute("aria-label", `Theme: ${NAMES[theme()]}`);
    button.title = "Colour theme: auto follows the system";
  };
  button.addEventListener("click", () => {
    choose(ORDER[(ORDER.indexOf(theme()) + 1) % ORDER.length]);
    label();
  });
  label();
  return button;
}

/** Call `changed` whenever colours change. Returns what ends that. */
export function onTheme(changed) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", changed);
  addEventListener("zstore-theme", changed);
  return () => {
    system.removeEventListener("change", changed);
    removeEventListener("zstore-theme", changed);
  };
}

/** Return the style of an element that has the colour of a series; `share` of it is seen. */
export function inColour(index, share = 1) {
  return { "--c": mixed(`series-${index}`, share, "transparent") };
}

const mixed = (name, share, behind) => `color-mix(in srgb, var(--${name}) ${100 * share}%, ${behind})`;

/** Return the present value of a colour of style.css, for drawing on a canvas; `share` of it is seen before another. */
export function colour(name, share = 1, behind = "transparent") {
  const probe = h("span", { hidden: true, style: { color: mixed(name, share, behind) } });
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

function choose(name) {
  const root = document.documentElement;
  if (name === "system") delete root.dataset.theme;
  else root.dataset.theme = name;
  try {
    if (name === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, name);
  } catch {
    // Storage may be forbidden; the choice then holds until the page is left.
  }
  dispatchEvent(new Event("zstore-theme"));
}
