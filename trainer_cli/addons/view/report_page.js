// Builds the page of a report, or of `train serve`, from its data, with the drawings of report_draw.js.
"use strict";
const byId = (id) => document.getElementById(id);
let data = { runs: [], looks: [], sections: [] };
const hidden = new Set();
const charts = new Map();  // By section, kind and title, so that a page that is built again keeps what is drawn.
const remembered = new Map();  // Of each table: its sorting, its filter, whether it is open.
// serve_page.js replaces these.
const live = { curves: null, isShown: (run) => !hidden.has(run), isChosen: (run) => !hidden.has(run), choose: null, open: null };

window.addEventListener("error", (event) => { byId("problem").textContent += `${event.message}\n`; });

// The settings are in the address, so that a reload or a copied link shows the same.
const state = { x: "step", smooth: null, logy: false, logx: false, trim: false, group: "", columns: new Map() };
for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
  if (key === "x" && ["step", "epoch", "time"].includes(value)) state.x = value;
  if (key === "smooth" && value !== "" && Number(value) >= 0 && Number(value) <= 0.99) state.smooth = Number(value);
  if (["logy", "logx", "trim"].includes(key)) state[key] = value === "1";
  if (key === "group") state.group = value;
  if (key === "column" || key === "no-column") state.columns.set(value, key === "column");
}

function remember() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const key of ["x", "smooth"]) words.set(key, state[key] ?? "");
  for (const key of ["logy", "logx"]) words.set(key, state[key] ? 1 : 0);
  if (state.trim) words.set("trim", 1); else words.delete("trim");
  if (state.group) words.set("group", state.group); else words.delete("group");
  for (const key of ["column", "no-column"]) words.delete(key);
  for (const [name, isShown] of state.columns) words.append(isShown ? "column" : "no-column", name);
  history.replaceState(null, "", `#${words}`);
}

const ownerOf = (curve) => curve.owner ?? data.runs[curve.run] ?? "";
const tintOf = (curve) => colour(curve.tint ?? curve.run);
const hasMany = (block) => data.many || new Set(block.curves.map(ownerOf)).size > 1;

// The number of each source of values, such as train and val: the same colour or dashes in all charts of the page.
const sources = new Map();
function numberSources(block) {
  const keys = new Set(), numbers = new Map();
  for (const group of new Set(block.curves.map((curve) => curve.group))) {
    const source = group.includes("/") ? group.slice(0, group.lastIndexOf("/")) : group, key = keys.has(source) ? group : source;
    keys.add(key);
    if (!sources.has(key)) sources.set(key, sources.size);
    numbers.set(group, sources.get(key));
  }
  return numbers;
}

// Steps before step 0 of a fork: beside its parent it is drawn from the step of the checkpoint with which it began.
function shiftOf(run, key) {
  let shift = 0, fork = key === "step" && (data.forks || {})[run];
  for (let depth = 0; fork && live.isShown(fork.parent) && depth < 100; depth += 1) {
    shift += fork.shift;
    fork = data.forks[fork.parent];
  }
  return shift;
}

function unitOfTime(curves) {
  const most = Math.max(1, ...curves.map((curve) => (curve.time && curve.time.length ? curve.time[curve.time.length - 1] : 0)));
  return most > 7200 ? [3600, "hours"] : most > 120 ? [60, "minutes"] : [1, "seconds"];
}

function describe(block, lines) {
  const texts = lines.filter((line) => !line.faint).slice(0, 8).map((line) => {
    const values = line.y.filter((value) => value !== null);
    if (!values.length) return `${line.name}: no finite value`;
    const [low, high] = extent([values]);
    return `${line.name}: last ${format(values[values.length - 1])}, smallest ${format(low)}, largest ${format(high)}`;
  });
  return `${block.title}. ${texts.join("; ")}`;
}

const ALL_RUNS = "all runs", SIDES = "side (A or B)";

// The mean of each metric over the runs with the same value of a config key, for each value.
function groupCurves(curves, valueOfRun, key) {
  const grouped = [], last = state.group.split(".").pop(), values = [...new Set(Object.values(valueOfRun))].sort(compareTexts);
  for (const name of new Set(curves.map((curve) => curve.name))) values.forEach((value, tint) => {
    const members = curves.filter((curve) => curve.name === name && valueOfRun[curve.run] === value);
    if (!members.length) return;
    const means = members.map((curve) => curve.mean || curve), count = `${members.length} run${members.length > 1 ? "s" : ""}`;
    const owner = state.group === ALL_RUNS ? count : `${state.group === SIDES ? value : `${last}=${value}`} (${count})`;
    const { x, ...mean } = meanOf(means.map((curve) => ({ x: curve[key], y: curve.y })));
    grouped.push({ run: -1, owner, tint, name, group: members[0].group, role: "", step: x, [key]: x, ...mean });
  });
  // Results of runs that are not in the page have no config.
  return [...grouped, ...curves.filter((curve) => valueOfRun[curve.run] === undefined)];
}

// Machines have no common time, and range tests of the learning rate no common steps.
const isGrouped = (block) => !block.axis && Object.hasOwn(data.groups || {}, state.group);

function linesOf(block, key, unit) {
  const numbers = numberSources(block), many = hasMany(block);
  const along = (curve, shift) => (key === "time" ? curve.time.map((value) => value / unit) : shift ? curve[key].map((value) => value + shift) : curve[key]);
  const shorten = (name) => (block.axis === "time" ? name.replace(/^machine\//, "") : name);
  const lines = [], shown = block.curves.filter((curve) => curve.y && live.isShown(curve.run));
  for (const curve of isGrouped(block) ? groupCurves(shown, data.groups[state.group], key) : shown) {
    const number = numbers.get(curve.group), shift = shiftOf(curve.run, key), x = along(curve, shift);
    const owner = many ? `${ownerOf(curve)}${shift ? `, from step ${format(shift)}` : ""}` : "", name = `${owner} ${shorten(curve.name)}`.trim();
    const line = { name, owner, group: shorten(curve.group), run: curve.run, step: curve.step, x, y: curve.y, low: curve.low, high: curve.high,
      bars: curve.bars, colour: many ? tintOf(curve) : colour(number), dash: many ? DASHES[number % DASHES.length] : "",
      bad: x.filter((_, at) => curve.y[at] === null && !curve.low) };
    const weight = state.smooth ?? (curve.y.length > 200 ? 0.6 : 0);
    if (weight > 0 && curve.role === "train" && curve.y.length > 2 && !curve.low) {
      const base = curve.mean || curve;
      lines.push({ ...line, faint: true });
      lines.push({ ...line, name: `${name} smoothed`, x: along(base, shift), y: smooth(base.y, weight), step: base.step, bad: [] });
    } else lines.push(line);
  }
  return lines;
}

const AROUND_PX = 130;  // Height of the title and the legend of a chart that fills the screen.
const ENTRY_PX = 50;  // Width of a chart for each entry of its legend.
let zoomed = null;  // The part of the x axis that all curves show.
function drawCurves(block, plot, chart) {
  const curves = block.curves.filter((curve) => curve.y);
  const wanted = block.axis || state.x, key = curves.every((curve) => curve[wanted]) ? wanted : "step";
  const [unit, unitName] = unitOfTime(curves), lines = linesOf(block, key, unit), many = hasMany(block);
  const isOfPairs = block.axis === "pairs", logx = !isOfPairs && (block.logx || state.logx);  // The rates of a range test are spread over decades.
  const at = (mark) => (key === "time" ? mark.time / unit : mark[key] + shiftOf(mark.run, key));
  const marks = (block.restarts || []).filter((mark) => !isGrouped(block) && live.isShown(mark.run) && (!logx || at(mark) > 0)).slice(0, 100);
  const title = isOfPairs ? "pairs" : key === "time" ? `${unitName} since the run began` : key;
  chart.view = drawLines(plot, lines, {
    height: chart === enlarged ? innerHeight - AROUND_PX : undefined, logx, logy: state.logy, trimsOutliers: state.trim, range: isOfPairs ? [0.5, curves[0].step.length + 0.5] : key === state.x ? zoomed : null, title, label: describe(block, lines),
    levels: block.levels, whole: isOfPairs, marks: marks.map((mark) => ({ at: at(mark), text: mark.text, colour: many ? colour(mark.run) : null })),
  });
  // Pairs are not zoomed.
  Object.assign(chart.view, { axis: title, key: isOfPairs ? title : key });
  addLegend(plot, lines, many);
  const { trimmedFrom } = chart.view, trimmed = trimmedFrom ? [`trimmed: values from ${format(trimmedFrom[0])} to ${format(trimmedFrom[1])}`] : [];
  const notes = [notesOf(block, many), ...trimmed].filter(Boolean).join("; ");
  chart.note.textContent = notes;
  chart.note.hidden = !notes;
}

function notesOf(block, many) {
  const bad = block.curves.filter((curve) => curve.bad).map((curve) =>
    `${many ? `${ownerOf(curve)} ` : ""}${curve.name}: ${curve.bad[0]} value${curve.bad[0] > 1 ? "s" : ""} not finite (×), first at step ${curve.bad[1]}`);
  return [...(block.note ? [block.note] : []), ...bad.slice(0, 3)].join("; ");
}

// Of one run the names of its lines; of several runs the colour of each run and the dashes of each metric.
function addLegend(plot, lines, many) {
  const named = lines.filter((line) => !line.faint), entries = new Map();
  if (named.length < 2) return;
  for (const line of named) entries.set(many ? line.owner || line.name : line.name, [line.colour, many ? "" : line.dash]);
  const dashes = many ? new Map(named.map((line) => [line.group, line.dash])) : new Map();
  const legend = element("div", null, plot, "legend");
  const room = Math.max(6, Math.floor(plot.clientWidth / ENTRY_PX)), count = entries.size > room + 1 ? room : entries.size;
  for (const [text, [tint, dash]] of [...entries].slice(0, count)) addEntry(legend, text, tint, dash);
  if (entries.size > count) element("span", `and ${entries.size - count} more`, legend);
  if (dashes.size > 1) for (const [text, dash] of dashes) addEntry(legend, text, "var(--ink)", dash);
}

function addEntry(legend, text, tint, dash) {
  const entry = element("span", null, legend), svg = shape("svg", { width: 26, height: 10, "aria-hidden": true }, entry);
  const line = shape("line", { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 2, "stroke-dasharray": dash }, svg);
  line.style.stroke = tint;
  element("span", cut(text, LONGEST_NAME), entry).title = text;
}

const DRAW = { chart: drawCurves, timeline: drawTimeline, parallel: drawParallel, scatter: drawScatter, bars: drawBars };

// A chart is drawn once it is about to be seen: a run may have hundreds of metrics.
const inView = new Set();
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = [...charts.values()].find((other) => other.plot === entry.target);
    if (!chart) continue;
    inView[entry.isIntersecting ? "add" : "delete"](chart);
    if (entry.isIntersecting) draw(chart);
  }
}, { rootMargin: "500px" });

async function draw(chart) {
  const settings = JSON.stringify([state, zoomed, [...hidden], chart.plot.clientWidth, chart === enlarged, live.version]);
  if (chart.drawn === settings) return;
  chart.drawn = settings;
  if (live.curves && chart.block.kind === "chart") {
    const { block } = chart;
    if (!(await live.curves(block)) || chart.block !== block) return;
  }
  DRAW[chart.block.kind](chart.block, chart.plot, chart);
}

function redraw() {
  byId("smoothed").textContent = state.smooth === null ? "auto" : state.smooth.toFixed(2);
  for (const chart of inView) draw(chart);
}

let enlarged = null;  // The chart that fills the screen.
async function enlarge(chart) {
  if (enlarged) enlarged.frame.classList.remove("enlarged");
  enlarged = enlarged === chart ? null : chart;
  if (enlarged) enlarged.frame.classList.add("enlarged");
  endHover();
  redraw();
  try {
    // The whole page: what it shows over the chart stays visible.
    if (enlarged) await document.documentElement.requestFullscreen();
    else if (document.fullscreenElement) await document.exitFullscreen();
  } catch {
    // Where a browser refuses, the chart fills the window.
  }
}
document.addEventListener("fullscreenchange", () => { if (enlarged && !document.fullscreenElement) enlarge(enlarged); });
document.addEventListener("keydown", (event) => { if (enlarged && event.key === "Escape") enlarge(enlarged); });

const REACH_PX = 6;  // Distance from the ends of a curve at which the pointer still reads it.
function readableAt(view, x) {
  const at = view.xs.at(x);
  return view.lines.filter((line) => !line.faint && line.x.length
    && view.xs.at(line.x[0]) - REACH_PX <= at && at <= view.xs.at(line.x[line.x.length - 1]) + REACH_PX);
}

// One line through all curves in view at the x of the pointer, and the values there.
function hoverAt(source, x, y, pointer) {
  for (const chart of inView) {
    if (!chart.view || chart.view.axis !== source.view.axis) continue;
    const { hover, xs, ys, box } = chart.view, at = xs.at(x);
    hover.replaceChildren();
    if (!(at >= box.left - 1 && at <= box.right + 1)) continue;
    shape("line", { class: "cross", x1: at, x2: at, y1: box.top, y2: box.bottom }, hover);
    for (const line of readableAt(chart.view, x).slice(0, 40)) {
      const index = nearest(line.x, x), value = line.y[index];
      if (value === null || (ys.isLog && value <= 0)) continue;
      shape("circle", { cx: xs.at(line.x[index]), cy: ys.at(value), r: 3.5, fill: line.colour }, hover);
    }
  }
  const { ys, axis } = source.view;
  const values = readableAt(source.view, x).map((line) => {
    const index = nearest(line.x, x), value = line.y[index];
    return { line, index, value, far: value === null ? Infinity : Math.abs(ys.at(value) - y) };
  }).sort((a, b) => a.far - b.far);
  const tip = byId("tip");
  tip.replaceChildren();
  element("b", `${axis} ${format(["step", "pairs"].includes(axis) ? Math.round(x) : x)}`, tip);
  for (const { line, value, index } of values.slice(0, 12)) {
    const row = element("div", null, tip);
    element("i", null, row).style.background = line.colour;
    setWords(element("span", null, row), line.name);
    const range = line.low && line.low[index] !== null && value !== null ? ` (${format(line.low[index])} to ${format(line.high[index])})` : "";
    // An evaluation has no value at most steps: say where the nearest one is.
    const away = Math.abs(line.x[index] - x) > 0.01 * (source.view.xs.high - source.view.xs.low) ? ` at ${format(line.x[index])}` : "";
    element("b", format(value) + range + away, row);
  }
  if (values.length > 12) element("div", `and ${values.length - 12} more`, tip);
  place(tip, pointer);
  return values[0];
}

function place(tip, pointer) {
  tip.hidden = false;
  const left = pointer.x + 16 + tip.offsetWidth > innerWidth ? pointer.x - 16 - tip.offsetWidth : pointer.x + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(pointer.y + 12, innerHeight - tip.offsetHeight - 4))}px`;
}

function endHover() {
  byId("tip").hidden = true;
  for (const chart of inView) if (chart.view) chart.view.hover.replaceChildren();
}

function zoomTo(range) {
  zoomed = range;
  byId("unzoom").hidden = !range;
  endHover();
  redraw();
}

// Hover, a click on a point, a drag along x that zooms all curves, and the same by keys.
function watch(chart) {
  const { plot } = chart;
  let from = null;
  const position = (event) => {
    const corner = plot.getBoundingClientRect();
    return [event.clientX - corner.left, event.clientY - corner.top];
  };
  const look = (event) => {
    const [x, y] = position(event), { box, xs } = chart.view;
    return hoverAt(chart, xs.value(Math.min(box.right, Math.max(box.left, x))), y, { x: event.clientX, y: event.clientY });
  };
  plot.addEventListener("pointermove", (event) => {
    if (!chart.view || event.target.tagName === "SPAN") return;
    if (from !== null && Math.abs(position(event)[0] - from) > 5) {
      const { hover, box } = chart.view, [a, b] = [from, position(event)[0]].sort((one, other) => one - other);
      endHover();
      shape("rect", { class: "brush", x: a, width: b - a, y: box.top, height: box.bottom - box.top }, hover);
    } else look(event);
  });
  plot.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.pointerType === "mouse") [from] = position(event); });
  plot.addEventListener("pointerup", (event) => {
    if (!chart.view) return;
    const [x] = position(event), { xs } = chart.view, start = from;
    from = null;
    if (start !== null && Math.abs(x - start) > 5) return chart.view.key === state.x && zoomTo([xs.value(Math.min(x, start)), xs.value(Math.max(x, start))]);
    const point = look(event);
    if (point) lookAt(point.line.run, point.line.step[point.index]);
  });
  plot.addEventListener("pointerleave", () => { from = null; endHover(); });
  plot.addEventListener("dblclick", () => zoomTo(null));
  plot.addEventListener("blur", endHover);
  plot.addEventListener("keydown", (event) => {
    const line = chart.view && chart.view.lines.find((other) => !other.faint && other.x.length);
    const isMove = ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key), scale = SCALES[event.key];
    if (!line || !(isMove || scale || ["Enter", "Escape"].includes(event.key)) || isShortcut(event)) return;
    event.preventDefault();
    if (event.key === "Escape") return zoomTo(null);
    if (scale) return scaleAt(chart, line.x[chart.at ?? 0], scale);
    if (event.key === "Enter") return lookAt(line.run, line.step[chart.at ?? 0]);
    // Only points that are drawn: a zoomed chart leaves others out.
    const { low, high } = chart.view.xs, inside = line.x.map((_, at) => at).filter((at) => line.x[at] >= low && line.x[at] <= high);
    chart.at = inside[moved(inside.indexOf(chart.at), event.key, inside.length)] ?? chart.at ?? 0;
    const corner = plot.getBoundingClientRect(), x = line.x[chart.at];
    hoverAt(chart, x, 0, { x: corner.left + chart.view.xs.at(x), y: corner.top });
    say();
  });
}

const SCALES = { "+": 0.5, "=": 0.5, "-": 2 };
const isShortcut = (event) => event.ctrlKey || event.altKey || event.metaKey;

// Zoom in around a value of x, or out of the middle: out of an end, that end would stay.
function scaleAt(chart, x, scale) {
  const { xs, box, lines, key } = chart.view, at = scale < 1 ? xs.at(x) : (box.left + box.right) / 2, [low, high] = extent(lines.map((line) => line.x));
  if (key !== state.x || !(low < high)) return;
  const [from, to] = [xs.value(at - (at - box.left) * scale), xs.value(at + (box.right - at) * scale)];
  zoomTo(from <= low && to >= high ? null : [Math.max(low, from), Math.min(high, to)]);
}

// The index to which a key moves among marks or points; -1: none is chosen yet.
function moved(index, key, count) {
  const by = { Home: -Infinity, End: Infinity, ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[key];
  return Math.min(count - 1, Math.max(0, index + by));
}

// Speak the tip that a key has shown. Those of the pointer are not spoken: they change with each of its moves.
function say() {
  const lines = [...byId("tip").children].map((line) => [...line.childNodes].map((node) => node.textContent).join(" ").trim());
  byId("said").textContent = lines.join("; ");
}

function showTip(text, pointer) {
  byId("tip").replaceChildren();
  for (const line of text.split("\n")) element("div", line, byId("tip"));
  place(byId("tip"), pointer);
}

// Show the tips of marks by keys.
function watchMarks(plot, label, keys = ["ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown", "Home", "End"]) {
  let at = -1;
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", label);
  const end = () => {
    byId("tip").hidden = true;
    for (const mark of plot.querySelectorAll(".at")) mark.classList.remove("at");
  };
  plot.addEventListener("keydown", (event) => {
    const marks = plot.querySelectorAll("[data-tip]");
    if (event.target !== plot || !marks.length || isShortcut(event)) return;
    if (event.key === "Escape") return end();
    if (!keys.includes(event.key)) return;
    event.preventDefault();
    end();
    at = moved(at, event.key, marks.length);
    marks[at].classList.add("at");
    marks[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    const { left, bottom, width } = marks[at].getBoundingClientRect();
    showTip(marks[at].dataset.tip, { x: left + Math.min(width, 60), y: bottom });
    say();
  });
  plot.addEventListener("blur", end);
}

// Checkpoints, runs of a sweep and the like say what they are where the pointer is.
document.addEventListener("pointerover", (event) => {
  const text = event.target.dataset && event.target.dataset.tip;
  if (!text) return;
  showTip(text, { x: event.clientX, y: event.clientY });
  event.target.addEventListener("pointerleave", () => { byId("tip").hidden = true; }, { once: true });
});

// The commands that look at a step of a run: of a clicked point, or of the step that is typed.
let looked = 0;
function lookAt(run, step) {
  if (run < 0) return;  // A mean is of no single run.
  looked = run;
  byId("step").value = step;
  showCommands();
}

function showCommands() {
  const panel = byId("commands"), look = data.looks[looked], text = byId("step").value, step = Number(text);
  panel.replaceChildren();
  if (!look || text === "" || !Number.isInteger(step) || step < 0) return;
  const isMade = look.start !== null && step > look.start;  // From a state that is there.
  const commands = [
    ...(isMade ? [`train replay ${look.run} ${step}`] : []),
    ...(step > 0 ? [`train data ${look.run} ${step}`] : []),
    ...(isMade ? [`train ckpt show ${look.run}@step${step}`] : []),
  ];
  for (const command of commands) {
    const line = element("div", null, panel), field = element("input", null, line), button = element("button", "copy", line);
    field.readOnly = true;
    field.value = command;
    field.setAttribute("aria-label", "command");
    field.addEventListener("focus", () => field.select());
    button.addEventListener("click", () => copy(field, button));
  }
}

async function copy(field, button) {
  field.select();
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(field.value);
  } catch {
    isCopied = document.execCommand("copy");  // The page of a file may have no clipboard.
  }
  button.textContent = isCopied ? "copied" : "press Ctrl-C";
}

function addChart(key, block, parent) {
  let chart = charts.get(key);
  if (!chart) {
    const frame = element("div", null, null, block.kind === "chart" || block.kind === "scatter" || block.kind === "bars" ? "chart" : "chart wide");
    setWords(element("h3", null, frame), block.title);
    const button = element("button", "⤢", frame, "enlarge");
    button.title = `full screen: ${block.title}`;
    button.setAttribute("aria-label", button.title);
    button.dataset.focus = `enlarge ${key}`;
    button.addEventListener("click", () => enlarge(chart));
    chart = { block, frame, note: element("p", null, frame), plot: element("div", null, frame, `plot ${block.kind}`), drawn: null, view: null };
    chart.note.hidden = true;
    if (block.kind === "chart") {
      chart.plot.tabIndex = 0;
      chart.plot.setAttribute("role", "group");
      chart.plot.setAttribute("aria-label", `${block.title}: arrow keys show the values at each point, + and - zoom, Enter chooses the step`);
      watch(chart);
    } else if (block.kind === "timeline") watchMarks(chart.plot, `${block.title}: arrow keys show each checkpoint`);
    else if (block.kind === "scatter") watchMarks(chart.plot, `${block.title}: arrow keys show each run`);
    // The other arrow keys scroll it.
    else if (block.kind === "parallel") watchMarks(chart.plot, `${block.title}: the arrow keys up and down show each run`, ["ArrowUp", "ArrowDown", "Home", "End"]);
    charts.set(key, chart);
    seen.observe(chart.plot);
  }
  parent.appendChild(chart.frame);
}

function addFacts(block, parent) {
  const list = element("dl", null, parent, "facts");
  for (const [name, text, share] of block.items) {
    const item = element("div", null, list);
    element("dt", name, item);
    const shown = setWords(element("dd", null, item), text);
    if (name === "state") shown.dataset.state = text.split(":")[0];
    if (share !== undefined) addBar(shown, share);
  }
}

// How a run ended badly, and what to do below; or what a comparison has answered.
function addBanner(block, parent) {
  const banner = element("div", null, parent, "banner");
  banner.dataset.state = block.state;
  setWords(element("b", null, banner), block.text);
  if (block.more) setWords(element("p", null, banner), block.more);
}

function addText(block, parent) {
  element("h3", block.title, parent);
  const text = makeScrollable(element("pre", block.text, parent, block.end ? "" : "prose"), block.title);
  if (block.end) requestAnimationFrame(() => { text.scrollTop = text.scrollHeight; });
}

const ADD = { banner: (key, block, parent) => addBanner(block, parent), facts: (key, block, parent) => addFacts(block, parent), table: addTable, media: addMedia, text: (key, block, parent) => addText(block, parent) };

// Show these data. A page with the same sections as before keeps its elements, and only their content is replaced.
const holders = new Map();  // Of each block that is no chart: the element that holds it.
let layout = null;
function render(next) {
  data = next;
  if (byId("title").textContent !== data.title) setWords(byId("title"), document.title = data.title);
  byId("made").textContent = data.made;
  const { focus } = document.activeElement.dataset, { selectionStart } = document.activeElement;
  const used = new Set();
  const sections = data.sections.map((section) => ({ title: section.title, blocks: section.blocks.map((block) => {
    let key = `${section.title}/${block.kind}/${block.title}`;
    while (used.has(key)) key += "+";
    used.add(key);
    return { key, block };
  }) }));
  for (const { block } of sections.flatMap((section) => section.blocks)) if (block.curves) numberSources(block);
  if (layout !== JSON.stringify([...used])) build(sections, used);
  layout = JSON.stringify([...used]);
  for (const { key, block } of sections.flatMap((section) => section.blocks)) {
    if (DRAW[block.kind]) {
      const chart = charts.get(key);
      if (chart.block === block) continue;
      const text = JSON.stringify(block);
      if (chart.text === text) continue;  // What a reader has chosen in it is kept.
      Object.assign(chart, { block, text, drawn: null });
    } else {
      const holder = holders.get(key), text = JSON.stringify(block);
      if (holder.text === text) continue;  // A reader may be selecting text in it.
      holder.text = text;
      holder.replaceChildren();
      ADD[block.kind](key, block, holder);
    }
  }
  if (focus && document.activeElement.dataset.focus !== focus) {
    const again = [...document.querySelectorAll("[data-focus]")].find((other) => other.dataset.focus === focus);
    if (again) again.focus({ preventScroll: true });
    if (again && again.type === "search") again.setSelectionRange(selectionStart, selectionStart);
  }
  byId("controls").hidden = !data.sections.length;
  byId("look").hidden = !Object.keys(data.looks).length;
  showGroups();
  findCharts();
  redraw();
}

function build(sections, used) {
  const main = document.createDocumentFragment(), links = document.createDocumentFragment();
  sections.forEach((section, index) => {
    const content = element("section", null, main);
    content.id = `section-${index}`;
    content.tabIndex = -1;
    element("h2", section.title, content);
    const link = element("a", section.title, links);
    link.href = `#${content.id}`;
    link.addEventListener("click", (event) => {
      event.preventDefault();  // The address holds the settings.
      content.scrollIntoView();
      content.focus({ preventScroll: true });
    });
    let grid = null;
    for (const { key, block } of section.blocks) {
      if (DRAW[block.kind]) addChart(key, block, grid = grid || element("div", null, content, "charts"));
      else {
        grid = null;
        holders.set(key, holders.get(key) || element("div"));
        content.appendChild(holders.get(key));
      }
    }
  });
  for (const [key, chart] of charts) if (!used.has(key)) {
    seen.unobserve(chart.plot);
    inView.delete(chart);
    charts.delete(key);
  }
  for (const key of holders.keys()) if (!used.has(key)) holders.delete(key);
  const top = scrollY;
  byId("sections").replaceChildren(main);
  byId("contents").replaceChildren(links);
  scrollTo(0, top);
}

// The keys of the config by which the curves can be grouped.
function showGroups() {
  const select = byId("group"), keys = Object.keys(data.groups || {});
  byId("grouping").hidden = !keys.length;
  if (select.dataset.keys === JSON.stringify(keys)) return;
  select.dataset.keys = JSON.stringify(keys);
  if (keys.includes(SIDES)) state.group ||= SIDES;
  select.replaceChildren();
  element("option", "no runs", select).value = "";
  for (const key of keys) element("option", key === ALL_RUNS ? key : `runs with the same ${key}`, select).value = key;
  select.value = keys.includes(state.group) ? state.group : "";
}

function findCharts() {
  const isFound = finder(byId("find").value);
  for (const chart of charts.values()) if (chart.block.curves) chart.frame.hidden = !chart.block.curves.some((curve) => isFound(curve.name));
  for (const frame of document.querySelectorAll(".medium")) frame.hidden = !isFound(frame.dataset.name);
}

for (const id of ["x", "smooth", "group"]) {
  if (id !== "group") byId(id).value = state[id] ?? 0;
  byId(id).addEventListener("input", () => {
    state[id] = id === "smooth" ? Number(byId(id).value) : byId(id).value;
    if (id === "x") zoomTo(null);
    remember();
    redraw();
  });
}
for (const id of ["logx", "logy", "trim"]) {
  byId(id).checked = state[id];
  byId(id).addEventListener("change", () => { state[id] = byId(id).checked; remember(); redraw(); });
}
byId("unzoom").addEventListener("click", () => zoomTo(null));
byId("find").addEventListener("input", findCharts);
byId("step").addEventListener("input", showCommands);
let resizing = null;
new ResizeObserver(() => { clearTimeout(resizing); resizing = setTimeout(redraw, 100); }).observe(byId("sections"));
// What the keyboard reaches is not scrolled behind the controls, where these stay at the top.
new ResizeObserver(() => {
  const controls = byId("controls"), isSticky = getComputedStyle(controls).position === "sticky";
  document.documentElement.style.scrollPaddingTop = `${isSticky ? controls.offsetHeight + 6 : 0}px`;
}).observe(byId("controls"));
if (byId("data")) render(JSON.parse(byId("data").textContent));
