// A click on the head of a column sorts a table by it; Escape puts an enlarged image back, and arrows go to the next one.
// Without scripts the tables stay as they are, and a click puts an image back.
"use strict";
document.addEventListener("keydown", event => {
  const open = document.querySelector(".zoom input:checked"), step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!open || !(step || event.key === "Escape")) return;
  const all = [...document.querySelectorAll(".gallery > figure > .zoom > input")].filter(each => each.offsetParent);
  event.preventDefault();
  open.checked = false;
  if (step) ((all.includes(open) && all[all.indexOf(open) + step]) || open).checked = true;
});
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("thead th")], body = table.tBodies[0];
  if (!body || body.rows.length < 2 || body.querySelector("[rowspan], [colspan]")) continue;
  const value = (row, place) => {
    const words = row.cells[place].textContent.replace("\u2212", "-").replace(/[≤ ,%\u00a0]/g, "");
    return Number.isNaN(parseFloat(words)) ? words : parseFloat(words);
  };
  const sort = place => {
    const up = heads[place].getAttribute("aria-sort") === "descending" ? 1 : -1;
    const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
    const rows = [...body.rows].map(row => [value(row, place), row]);
    rows.sort((a, b) => up * order(a[0], b[0]));
    body.append(...rows.map(pair => pair[1]));
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[place].setAttribute("aria-sort", up > 0 ? "ascending" : "descending");
  };
  heads.forEach((head, place) => {
    head.classList.add("sorts");
    head.tabIndex = 0;
    head.addEventListener("click", () => sort(place));
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(place); });
  });
}
