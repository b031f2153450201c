// Search over the lines of all programs: what does not match is hidden, and programs without a match stay closed.
// A communication and the comment above it are one.
const input = document.getElementById("search"), count = document.getElementById("count");
const programs = [...document.querySelectorAll(".program")];

function found(line, words) {
  const above = line.previousElementSibling;
  const together = line.classList.contains("communication") && above?.classList.contains("comment") ? [above, line] : [line];
  const text = together.map(each => each.textContent).join(" ").toLowerCase();
  const matches = words.length > 0 && words.every(word => text.includes(word));
  for (const each of matches ? together : [line]) each.classList.toggle("found", matches);
  return matches;
}

input?.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  let lines = 0, ranks = 0;
  for (const program of programs) {
    const here = [...program.querySelectorAll("b")].filter(line => found(line, words)).length;
    program.classList.toggle("searched", words.length > 0);
    program.closest("details").open = words.length ? here > 0 : program === programs[0];
    lines += here; ranks += here > 0;
  }
  count.textContent = words.length ? `${lines} lines in ${ranks} of ${programs.length} programs` : "";
});
