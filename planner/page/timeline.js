"use strict";
// Draws the windows of the simulated step: a row of a device group is its compute, in the colour of
// the stage, over its communication. A box is [group, stage, kind, micro-batch or "", start, ticks].
{
const {groups, stages, colours, kinds, windows, communication_s: passes, ticks} =
  JSON.parse(document.getElementById("timeline-data").textContent);
const SHADES = {backward: -0.3, "backward (inputs)": -0.3, "backward (weights)": 0.45};
const BESIDE = {send: "#72b7b2", "gradient reduction": "#e45756"};
const EXPOSED = "#e45756", HIDDEN = "#e4575666", OPTIMIZER = "#8a8f98";
const TOP = 6, BOTTOM = 26, HEIGHT = 900, FONT = "11px sans-serif", STEP = 0.1, ZOOM = 1.5, TINY = 0.4;

const parts = colour => [1, 3, 5].map(k => parseInt(colour.slice(k, k + 2), 16));
function shaded(colour, part) { // towards white, or for less than 0 towards black
  const to = part > 0 ? 255 : 0;
  const mixed = parts(colour).map(value => Math.round(value + (to - value) * Math.abs(part)));
  return `#${mixed.map(value => value.toString(16).padStart(2, "0")).join("")}`;
}
const isDark = colour => {
  const [r, g, b] = parts(colour);
  return 0.3 * r + 0.6 * g + 0.1 * b < 140;
};
const fills = new Map();
function fill(group, stage, kind) {
  const key = `${stage} ${kind}`;
  if (!fills.has(key)) {
    const later = stages[group].indexOf(stage) / stages[group].length; // of a group's stages
    const own = shaded(colours[group % colours.length], 0.5 * later);
    const shade = SHADES[kind] || 0;
    fills.set(key, BESIDE[kind] || (kind === "optimizer" ? OPTIMIZER : shaded(own, shade)));
  }
  return fills.get(key);
}

// Communication within a pass, under its box: what compute hides from its start, the rest at its end.
function beside(window) {
  const boxes = [], first = new Map(), last = new Map(), unit_s = window.unit_s;
  const add = (box, seconds, ends, colour, what) => {
    const length = Math.min(seconds / unit_s, box[5]);
    if (length > 0) boxes.push({box, start: ends ? box[4] + box[5] - length : box[4], length, colour, what});
  };
  for (const box of window.boxes) {
    const kind = kinds[box[2]], of = passes[box[1]];
    if (of === undefined) continue;
    const name = kind.startsWith("backward") ? "backward" : kind;
    if (name !== "forward" && name !== "backward" || kind === "backward (weights)") continue;
    add(box, of[name][1], false, HIDDEN, "communication that compute hides");
    add(box, of[name][0], true, EXPOSED, "communication that compute waits for");
    if (name === "forward" && !first.has(box[1])) first.set(box[1], box);
    if (name === "backward") last.set(box[1], box);
  }
  for (const [stage, box] of window.first ? first : []) {
    add(box, passes[stage].first_forward[1], false, HIDDEN, "gathers of weights that the forward hides");
  }
  for (const [stage, box] of window.last ? last : []) {
    add(box, passes[stage].last_backward[1], true, HIDDEN, "gradient reduction that the backward hides");
  }
  return boxes;
}

function shown(seconds, digits = 4) {
  const [unit, factor] = seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${Number((seconds * factor).toPrecision(digits))} ${unit}`;
}

function timeline(canvas) {
  const window = windows[canvas.dataset.timeline], figure = canvas.parentElement;
  const output = figure.querySelector("output"), pen = canvas.getContext("2d");
  const {start_s, unit_s, boxes} = window, under = beside(window);
  const compute = Math.max(3, Math.min(20, HEIGHT / groups.length - 12));
  const small = compute > 9 ? 4 : 1, gap = compute > 9 ? 5 : 1;
  const passing = compute + 1, sending = passing + small + 1, row = sending + small + gap;
  pen.font = FONT;
  const left = 12 + Math.max(...groups.map(name => pen.measureText(name).width));
  let view = [0, ticks], drags = null, width = 0, asked = false, drawn = {}; // ends, by lane
  const x = tick => left + (tick - view[0]) / (view[1] - view[0]) * (width - left - 1);
  const tickAt = at => view[0] + (at - left) / (width - left - 1) * (view[1] - view[0]);

  function move(start, span) {
    span = Math.min(ticks, Math.max(ticks * 1e-5, span));
    const from = Math.min(Math.max(0, start), ticks - span);
    view = [from, from + span];
    if (!asked) { asked = true; requestAnimationFrame(draw); }
  }
  const zoom = (factor, at = (view[0] + view[1]) / 2) =>
    move(at - (at - view[0]) / factor, (view[1] - view[0]) / factor);

  function bar(start, length, y, height, colour) {
    const from = Math.max(x(start), left), to = Math.min(x(start + length), width);
    if (to <= left || from >= width) return null;
    if (to - from < TINY && Math.abs(to - drawn[y]) < TINY) return null; // is there already
    drawn[y] = to;
    pen.fillStyle = colour;
    const apart = to - from > 4 ? 1 : 0;
    pen.fillRect(from, y, Math.max(to - from - apart, 0.6), height);
    return [from, to];
  }

  function axis(ink) {
    const span_s = (view[1] - view[0]) * unit_s, rough = span_s / Math.max(2, (width - left) / 90);
    const power = 10 ** Math.floor(Math.log10(rough)), parts = rough / power;
    const step = power * (parts > 5 ? 10 : parts > 2 ? 5 : parts > 1 ? 2 : 1);
    const zero_s = start_s + view[0] * unit_s, y = TOP + groups.length * row + 4;
    const digits = Math.max(2, Math.ceil(Math.log10((zero_s + span_s) / step)) + 1);
    pen.fillStyle = ink;
    pen.textAlign = "center";
    for (let s = Math.ceil(zero_s / step) * step; s <= zero_s + span_s; s += step) {
      const at = x((s - start_s) / unit_s);
      pen.globalAlpha = 0.25;
      pen.fillRect(at, TOP, 1, y - TOP);
      pen.globalAlpha = 1;
      if (at > left + 10 && at < width - 24) pen.fillText(s < step / 2 ? "0" : shown(s, digits), at, y + 14);
    }
  }

  function draw() {
    asked = false;
    drawn = {};
    const scale = devicePixelRatio || 1, height = TOP + groups.length * row + BOTTOM;
    width = figure.clientWidth;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const ink = getComputedStyle(canvas).color;
    pen.font = FONT;
    axis(ink);
    pen.textAlign = "right";
    const every = Math.ceil(12 / row);
    groups.forEach((name, k) => {
      pen.fillStyle = ink;
      if (k % every === 0) pen.fillText(name, left - 6, TOP + k * row + compute / 2 + 4);
    });
    pen.textAlign = "center";
    for (const [group, stage, kind, microbatch, start, length] of boxes) {
      const name = kinds[kind], y = TOP + group * row, over = !(name in BESIDE);
      const colour = fill(group, stage, name);
      const at = bar(start, length, over ? y : y + sending, over ? compute : small, colour);
      if (at && over && microbatch !== "" && compute > 9) {
        const text = String(microbatch);
        if (at[1] - at[0] > 7 * text.length + 3) {
          pen.fillStyle = isDark(colour) ? "#fff" : "#000";
          pen.fillText(text, (at[0] + at[1]) / 2, y + compute / 2 + 4);
        }
      }
    }
    for (const {box, start, length, colour} of under) {
      bar(start, length, TOP + box[0] * row + passing, small, colour);
    }
    canvas.dataset.view = view.map(tick => (start_s + tick * unit_s).toPrecision(6)).join(" ");
  }

  function told(event) {
    const at = canvas.getBoundingClientRect(), tick = tickAt(event.clientX - at.left);
    const y = event.clientY - at.top - TOP, group = Math.floor(y / row), lane = y - group * row;
    const has = (start, length) => start <= tick && tick < start + length;
    const over = lane <= compute, beside = !over && lane < sending;
    const box = boxes.find(b => b[0] === group && over !== kinds[b[2]] in BESIDE && has(b[4], b[5]));
    const comm = beside && under.find(c => c.box[0] === group && has(c.start, c.length));
    const of = comm ? comm.box : beside ? undefined : box;
    if (!of) { output.textContent = ""; return; }
    const what = comm ? comm.what : kinds[of[2]], length = comm ? comm.length : of[5];
    const microbatch = of[3] === "" ? "" : `, micro-batch ${of[3]}`;
    const from = shown(start_s + (comm ? comm.start : of[4]) * unit_s);
    output.textContent = `stage ${of[1]}: ${what}${microbatch}, ${shown(length * unit_s)} from ${from}`;
  }

  const keys = {
    ArrowLeft: () => move(view[0] - STEP * (view[1] - view[0]), view[1] - view[0]),
    ArrowRight: () => move(view[0] + STEP * (view[1] - view[0]), view[1] - view[0]),
    "+": () => zoom(ZOOM), "=": () => zoom(ZOOM), "-": () => zoom(1 / ZOOM),
    0: () => move(0, ticks), Home: () => move(0, ticks),
  };
  const pressed = (key, event) => {
    if (!(key in keys)) return;
    event.preventDefault();
    keys[key]();
  };
  canvas.addEventListener("keydown", event => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey) pressed(event.key, event);
  });
  for (const button of figure.querySelectorAll("[data-key]")) {
    button.addEventListener("click", event => pressed(button.dataset.key, event));
  }
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, tickAt(event.offsetX));
  }, {passive: false});
  canvas.addEventListener("dblclick", () => move(0, ticks));
  canvas.addEventListener("pointerdown", event => {
    drags = {x: event.clientX, from: view[0]};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (drags === null) { told(event); return; }
    const span = view[1] - view[0];
    move(drags.from - (event.clientX - drags.x) / (width - left) * span, span);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drags = null; });
  new ResizeObserver(() => move(view[0], view[1] - view[0])).observe(figure);
  for (const media of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(media).addEventListener("change", draw);
  }
  draw();
}
document.querySelectorAll("[data-timeline]").forEach(timeline);
}
