"use strict";
// Draws the charts, shows a plan's difference, copies. No strings become code: `ast` interprets.
const specs = JSON.parse(document.getElementById("charts").textContent);
const LEGENDS = [[480, 1], [900, 3], [Infinity, 7]]; // columns of a legend below so many pixels
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
  const {legend} = spec.config;
  legend.columns = LEGENDS.find(([width]) => place.clientWidth < width)[1];
  if (legend.columns === 1) legend.layout = {bottom: {direction: "vertical"}}; // one below another
  const {view} = await vegaEmbed(place, spec, options);
  view.addEventListener("click", (event, item) => {
    if (item && item.datum && item.datum.id) show(item.datum.id, true);
  });
  place.querySelector("summary").setAttribute("aria-label", "Save the chart as an image");
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
// what is wider than its place shows it
for (const place of document.querySelectorAll(".scroll, nav ol")) {
  const look = () => {
    const left = place.scrollWidth - place.clientWidth - place.scrollLeft;
    place.classList.toggle("more", left > 2);
  };
  place.addEventListener("scroll", look, {passive: true});
  new ResizeObserver(look).observe(place);
}
// the link to what is read is marked
const links = new Map([...document.querySelectorAll("nav a")].map(a => [a.hash.slice(1), a]));
const seen = new Set();
const watch = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    if (isIntersecting) seen.add(target.id); else seen.delete(target.id);
  }
  const first = [...links.keys()].find(name => seen.has(name));
  for (const [name, link] of links) link.toggleAttribute("aria-current", name === first);
  const bar = document.querySelector("nav ol"), link = links.get(first);
  if (link) bar.scrollLeft = link.offsetLeft - bar.clientWidth / 2;
}, {rootMargin: "-20% 0px -60% 0px"});
document.querySelectorAll("main section").forEach(each => watch.observe(each));
// on paper there are no clicks: the tables and lists are open there
const closed = new Set();
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("main details:not(.diagram):not([open])")) {
    if (each.closest(".chart") === null) { closed.add(each); each.open = true; }
  }
});
addEventListener("afterprint", () => {
  for (const each of closed) each.open = false;
  closed.clear();
});
const hidden = place => place.closest("details.diagram:not([open])");
for (const each of document.querySelectorAll("details.diagram")) {
  each.addEventListener("toggle", () => {
    const place = each.querySelector("[data-chart]:not([data-drawn])");
    if (each.open && place) draw(place);
  });
}
const charts = [...document.querySelectorAll("[data-chart]")];
const drawn = charts.filter(place => !hidden(place)).map(draw);
Promise.all(drawn).then(() => { document.body.dataset.drawn = "true"; });
