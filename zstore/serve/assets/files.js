// Files that people save from the page.

/** Have the browser save `blob` as a file. */
export function save(name, blob) {
  const anchor = document.createElement("a");
  anchor.download = name.replace(/[^\w.-]+/g, "-");
  anchor.href = URL.createObjectURL(blob);
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60_000);
}

/** Return columns, each its name and values, as CSV (RFC 4180); null is an empty field. */
export function toCsv(columns) {
  const field = (value) => (/[",\r\n]/.test((value ?? "").toString()) ? `"${value.replaceAll('"', '""')}"` : (value ?? ""));
  return columns[0].map((_, row) => `${columns.map((column) => field(column[row])).join(",")}\r\n`).join("");
}
