"use strict";
// Draws the charts, shows a plan's difference, copies. No strings become code: `ast` interprets.
const specs = JSON.parse(document.getElementById("charts").textContent);
const NARROW = 480; // pixels, below which a legend is one column
const options = {
  ast: true,
  actions: {export: true, source: false, compiled: false, editor: false},
  tooltip: {theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"},
};

function show(plan, open) {
  const row = document.getElementById(`${plan}-difference`);
  if (row === null) return; // the chosen plan itself
  const button = document.querySelector(`[data-plan="${plan}"]`);
  row.hidden = open === undefined ? !row.hidden : !open;
  button.setAttribute("aria-expanded", String(!row.hidden));
  if (!row.hidden) row.scrollIntoView({block: "nearest"});
}

async function draw(place) {
  const spec = specs[place.dataset.chart];
  if (place.clientWidth < NARROW) spec.config.legend.columns = 1;
  const {view} = await vegaEmbed(place, spec, options);
  view.addEventListener("click", (event, item) => {
    if (item && item.datum && item.datum.id) show(item.datum.id, true);
  });
  place.dataset.drawn = "true";
}

for (const button of document.querySelectorAll("[data-plan]")) {
  button.addEventListener("click", () => show(button.dataset.plan));
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    const said = document.getElementById("said");
    try {
      await navigator.clipboard.writeText(source.textContent);
      said.textContent = button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      said.textContent = button.textContent = "Selected: copy it now";
    }
  });
}
const drawn = [...document.querySelectorAll("[data-chart]")].map(draw);
Promise.all(drawn).then(() => { document.body.dataset.drawn = "true"; });
