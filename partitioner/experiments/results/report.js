// The table of all placements: a click on a heading sorts by it, a search hides the rows that do not match.
const table = document.getElementById("all"), input = document.getElementById("search"), count = document.getElementById("count");
const rows = table ? [...table.tBodies[0].rows] : [];

function order(column, numeric) {
  const value = row => row.cells[column].dataset.value;
  return (one, other) => numeric ? Number(value(one)) - Number(value(other)) : value(one).localeCompare(value(other));
}

table?.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
  const head = button.parentElement, ascending = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const sorted = [...rows].sort(order(column, head.classList.contains("number")));
  table.tBodies[0].append(...(ascending ? sorted : sorted.reverse()));
}));

input?.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) row.classList.toggle("hidden", !words.every(word => row.textContent.toLowerCase().includes(word)));
  count.textContent = words.length ? `${rows.filter(row => !row.classList.contains("hidden")).length} of ${rows.length}` : "";
});
