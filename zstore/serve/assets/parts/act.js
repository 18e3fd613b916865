// Whether actions are possible here, questions before them, and signing in where the service asks for its token.

import { isReport } from "../data.js";
import { h, replace } from "../dom.js";
import { askForToken } from "../session.js";

/** Why nothing can be done here; null where it can, maybe after signing in. */
export function whyNot(service) {
  if (isReport) return "This is a report. Actions need the service that it was made from.";
  if (!service.allows_actions) return "This service is read-only: actions need zstore serve --allow-actions and a token.";
  return null;
}

/** Return a box over the page, open. It is gone once it is closed. */
export function openDialog(label, ...children) {
  const dialog = h("dialog", { class: "box", "aria-label": label, test: "dialog" });
  replace(dialog, children);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** Ask before something is done. Resolves to whether it shall be. */
export function confirmed({ title, text, button, danger = false }) {
  return new Promise((resolve) => {
    let answer = false;
    const yes = () => {
      answer = true;
      dialog.close();
    };
    const dialog = openDialog(
      title,
      h("h2", null, title),
      h("p", null, text),
      h(
        "div",
        { class: "row box-buttons" },
        h("button", { type: "button", class: danger ? "danger" : "primary", onclick: yes, test: "confirm" }, button),
        h("button", { type: "button", onclick: () => dialog.close(), autofocus: true, test: "cancel" }, "Cancel"),
      ),
    );
    dialog.addEventListener("close", () => resolve(answer));
  });
}

/**
 * Do what needs the token: where the service asks for it, so does the page, and then goes on.
 * @param {() => Promise<object>} attempt
 * @param {object} context Of the view.
 * @param {string} text What the token is needed for.
 * @returns {Promise<object | null>} The answer; null where the box was closed without a token.
 */
export async function act(attempt, context, text) {
  try {
    return await attempt();
  } catch (error) {
    if (error.status !== 401) throw error;
  }
  if (!(await signedIn(context, text))) return null;
  return attempt();
}

function signedIn(context, text) {
  return new Promise((resolve) => {
    let taken = false;
    const done = async () => {
      taken = true;
      await context.learn();
      dialog.close();
    };
    const dialog = openDialog(
      "Sign in",
      askForToken(done, text),
      h("button", { type: "button", class: "quiet", onclick: () => dialog.close(), test: "cancel" }, "Cancel"),
    );
    dialog.addEventListener("close", () => resolve(taken));
  });
}

/** A button that acts; disabled with the reason as its title, where there is one. */
export function actionButton(text, test, onclick, reason, kind = "") {
  return h("button", { type: "button", class: kind, onclick, test, disabled: reason !== null, title: reason }, text);
}
