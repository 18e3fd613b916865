// Runs before the page is painted: the theme that was chosen here, else the system's.
(function () {
  "use strict";
  try {
    const chosen = localStorage.getItem("zstore-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage may be forbidden; then the system's theme stays.
  }
})();
