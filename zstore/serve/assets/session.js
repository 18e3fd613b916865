// Signing in with the service's token, and out. The page never keeps the token: the service gives a cookie for it.

import { post, remove } from "./data.js";
import { h, replace } from "./dom.js";

const PATH = "api/session";

/** The box that asks for the token; `done` is called when the service has taken it. */
export function askForToken(done, text = "This service needs a token.") {
  const field = h("input", {
    type: "password",
    id: "token",
    name: "token",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
    test: "token",
  });
  const trouble = h("p", { class: "bad", role: "alert", test: "token-problem" });
  const button = h("button", { type: "submit", class: "primary", test: "sign-in" }, "Sign in");
  const send = async (event) => {
    event.preventDefault();
    button.disabled = true;
    replace(trouble);
    try {
      await post(PATH, { token: field.value.trim() });
      field.value = "";
      await done();
    } catch (error) {
      replace(trouble, error.status === 401 || error.status === 403 ? `Sign-in failed: ${error.message}` : error.message);
      field.select();
    } finally {
      button.disabled = false;
    }
  };
  return h(
    "section",
    { class: "panel sign-in" },
    h("h2", null, "Sign in"),
    h("p", null, text),
    h(
      "form",
      { onsubmit: send },
      h("label", { for: "token" }, "Token"),
      h("div", { class: "row" }, field, button),
      trouble,
      h("p", { class: "hint" }, "A token of this service: ask whoever runs it (zstore serve token add)."),
    ),
  );
}

/** What the header shows of the session: a button to sign in or out, or nothing where there is no token. */
export function sessionButton(service, changed) {
  if (service.authorized) {
    const leave = async () => {
      await remove(PATH).catch(() => {}); // What the service says then shows whether it worked.
      await changed();
    };
    return h("button", { type: "button", class: "quiet", onclick: leave, test: "sign-out" }, "Sign out");
  }
  if (!service.allows_actions || service.needs_token) return null; // The view asks for it, where it is needed to read.
  const text = "With the token you can verify and prune checkpoints, and tell a run to save or stop.";
  const open = () => void signIn(text, "Close", changed);
  return h("button", { type: "button", class: "quiet", onclick: open, test: "open-sign-in" }, "Sign in");
}

/** Ask for the token in a box over the page; once it is closed, resolves to whether the service has taken the token. */
export function signIn(text, close, taken) {
  return new Promise((resolve) => {
    let signedIn = false;
    const done = async () => {
      signedIn = true;
      await taken();
      dialog.close();
    };
    const dialog = openDialog(
      "Sign in",
      askForToken(done, text),
      h("button", { type: "button", class: "quiet", onclick: () => dialog.close(), test: "cancel" }, close),
    );
    dialog.addEventListener("close", () => resolve(signedIn));
  });
}

/** Return a box over the page, open. It is gone once it is closed. */
export function openDialog(label, ...children) {
  const dialog = h("dialog", { class: "box", "aria-label": label, test: "dialog" }, children);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
