// Search over the lines of all programs: what does not match is hidden, and programs without a match stay closed.
const input = document.getElementById("search"), count = document.getElementById("count");
const programs = [...document.querySelectorAll(".program")];
input?.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  let lines = 0, ranks = 0;
  for (const program of programs) {
    let here = 0;
    for (const line of program.querySelectorAll("b")) {
      const found = words.length > 0 && words.every(word => line.textContent.toLowerCase().includes(word));
      line.classList.toggle("found", found);
      here += found;
    }
    program.classList.toggle("searched", words.length > 0);
    program.closest("details").open = words.length ? here > 0 : program === programs[0];
    lines += here; ranks += here > 0;
  }
  count.textContent = words.length ? `${lines} lines in ${ranks} of ${programs.length} programs` : "";
});
