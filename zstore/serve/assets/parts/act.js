// Whether actions are possible here, questions before them, and signing in where the service asks for its token.

import { isReport } from "../data.js";
import { h } from "../dom.js";
import { openDialog, signIn } from "../session.js";

/** Why nothing can be done here; null where it can, maybe after signing in. */
export function whyNot(service) {
  if (isReport) return "This is a report. Actions need the service that it was made from.";
  if (!service.allows_actions) return "This service is read-only: actions need zstore serve --allow-actions and a token.";
  if (service.authorized && service.role !== "act") return `Actions need a token with the role act: the role of yours is ${service.role}.`;
  return null;
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
  if (!(await signIn(text, "Cancel", () => context.learn()))) return null;
  return attempt();
}

/** A button that acts; disabled with the reason as its title, where there is one. */
export function actionButton(text, test, onclick, reason, kind = "") {
  return h("button", { type: "button", class: kind, onclick, test, disabled: reason !== null, title: reason }, text);
}
