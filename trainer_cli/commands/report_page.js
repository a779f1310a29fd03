// Draws the data of a report. All texts of runs are set as text, and escaped where plotly would read markup.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const PALETTE = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f"];
const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const LAYOUT = {
  margin: { l: 62, r: 14, t: 26, b: 40 }, font: { size: 12, color: "#1c2430" }, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
  hovermode: "closest", hoverlabel: { align: "left", namelength: 60 }, legend: { orientation: "h", y: -0.22 },
};
const AXIS = { gridcolor: "#e8ebef", linecolor: "#c4cad2", zeroline: false, automargin: true };
const manyRuns = new Set(data.sections.flatMap((one) => one.blocks).flatMap((one) => one.curves || []).map((one) => one.run)).size > 1;
const hidden = new Set();
const charts = [];

const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const colour = (index, count) =>
  count <= PALETTE.length ? PALETTE[index % PALETTE.length] : `hsl(${Math.round((360 * index) / count)}, 65%, 45%)`;
const colourOfRun = (run) => colour(run, data.runs.length);

function element(tag, text, parent, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.appendChild(made);
  return made;
}

window.addEventListener("error", (event) => { byId("problem").textContent += `${event.message}\n`; });

// The settings are in the address, so that a reload or a copied link shows the same.
const longest = Math.max(0, ...data.sections.flatMap((one) => one.blocks).flatMap((one) => one.curves || []).map((one) => one.step.length));
const state = { x: "step", smooth: longest > 200 ? 0.6 : 0, logy: false, logx: false };
for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
  if (key === "x" && ["step", "epoch", "time"].includes(value)) state.x = value;
  if (key === "smooth" && Number(value) >= 0 && Number(value) <= 0.99) state.smooth = Number(value);
  if (key === "logy" || key === "logx") state[key] = value === "1";
}

function remember() {
  const { x, smooth, logy, logx } = state;
  history.replaceState(null, "", `#x=${x}&smooth=${smooth}&logy=${logy ? 1 : 0}&logx=${logx ? 1 : 0}`);
}

// Exponential moving average, as TensorBoard computes it; null is a gap.
function smooth(values, weight) {
  let last = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + (1 - weight) * value;
    norm = norm * weight + (1 - weight);
    return last / norm;
  });
}

function unitOfTime(curves) {
  const most = Math.max(1, ...curves.map((one) => (one.time && one.time.length ? one.time[one.time.length - 1] : 0)));
  return most > 7200 ? [3600, "hours"] : most > 120 ? [60, "minutes"] : [1, "seconds"];
}

function drawCurves(chart, plot) {
  const key = chart.curves.every((one) => one[state.x]) ? state.x : "step";
  const [unit, unitName] = unitOfTime(chart.curves);
  const along = (one) => (key === "time" ? one.time.map((value) => value / unit) : one[key]);
  const groups = [...new Set(chart.curves.map((one) => one.group))];
  const traces = [];
  let shown = 0;
  for (const one of chart.curves) {
    if (hidden.has(one.run)) continue;
    const group = groups.indexOf(one.group);
    const line = {
      color: manyRuns ? colourOfRun(one.run) : colour(group, groups.length), width: 1.6,
      dash: manyRuns ? DASHES[group % DASHES.length] : "solid",
    };
    const run = manyRuns && data.runs[one.run] !== undefined ? `${data.runs[one.run]} ` : "";
    const name = escaped(run + one.name);
    const few = one.role === "validate" || one.step.length < 40;
    const common = { type: "scatter", name, meta: one.run, customdata: one.step, mode: few ? "lines+markers" : "lines", marker: { size: 5, color: line.color },
      hovertemplate: `%{y:.6~g}<br>${key === "time" ? `%{x:.4~g} ${unitName}` : `${key} %{x}`}<extra>%{fullData.name}</extra>` };
    const smoothed = state.smooth > 0 && one.role === "train" && one.step.length > 2;
    traces.push({ ...common, x: along(one), y: one.y, line: smoothed ? { ...line, width: 1 } : line,
      opacity: smoothed ? 0.25 : 1, showlegend: !smoothed });
    if (smoothed) {
      const base = one.mean || one;
      traces.push({ ...common, name: `${name} smoothed`, mode: "lines", x: along(base), y: smooth(base.y, state.smooth), customdata: base.step, line });
    }
    shown += 1;
  }
  const marks = (chart.restarts || []).filter((one) => !hidden.has(one.run)).slice(0, 100);
  const at = (one) => (key === "time" ? one.time / unit : one[key]);
  const type = state.logx ? "log" : "linear";
  Plotly.react(plot, traces, {
    ...LAYOUT,
    showlegend: shown > 1 && (!manyRuns || shown <= 4),  // The table of runs is the legend of many.
    xaxis: { ...AXIS, type, title: { text: key === "time" ? `${unitName} since the run began` : key, standoff: 6 } },
    yaxis: { ...AXIS, type: state.logy ? "log" : "linear", uirevision: state.logy, exponentformat: "power", minexponent: 5, separatethousands: true, nticks: 7 },
    shapes: marks.filter((one) => !state.logx || at(one) > 0).map((one) => ({
      type: "line", x0: at(one), x1: at(one), y0: 0, y1: 1, yref: "paper",
      line: { color: manyRuns ? colourOfRun(one.run) : "#8a94a0", width: 1, dash: "dot" },
    })),
    uirevision: `${key}${state.logx}`,
  }, CONFIG);
  if (!plot.watched) {
    plot.watched = true;
    plot.on("plotly_relayout", (change) => zoomAll(plot, change));
    plot.on("plotly_click", (event) => lookAt(event.points[0].data.meta, event.points[0].customdata));
  }
}

// A zoom along x applies to all curves that are drawn over the same axis.
let zooming = false, zoomed = null;
function zoomAll(source, change) {
  const range = change["xaxis.range[0]"] !== undefined ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null;
  if (zooming || (!range && !change["xaxis.autorange"])) return;
  zooming = true;
  zoomed = range;
  const update = range ? { "xaxis.range": range } : { "xaxis.autorange": true };
  const others = charts.filter((one) => one.drawn && one.block.kind === "chart" && one.plot !== source);
  Promise.all(others.map((one) => Plotly.relayout(one.plot, update))).finally(() => { zooming = false; });
}

function notes(chart) {
  const bad = chart.curves.filter((one) => one.bad).map((one) => {
    const run = manyRuns ? `${data.runs[one.run]} ` : "";
    return `${run}${one.name}: ${one.bad[0]} value${one.bad[0] > 1 ? "s" : ""} not finite, first at step ${one.bad[1]}`;
  });
  const groups = [...new Set(chart.curves.map((one) => one.group))];
  const dashes = manyRuns && groups.length > 1 ? groups.map((one, index) => `${one} ${DASHES[index % DASHES.length]}`) : [];
  return [...(dashes.length ? [dashes.join(", ")] : []), ...bad.slice(0, 3)].join("; ");
}

function drawTimeline(block, plot) {
  const lanes = new Map(block.lanes.map((lane, index) => [lane, block.lanes.length - 1 - index]));
  const kinds = new Map();
  for (const mark of block.marks) {
    const kind = `${mark.type || "unknown"}, ${mark.kept ? "kept" : "removed"}`;
    if (!kinds.has(kind)) kinds.set(kind, []);
    kinds.get(kind).push(mark);
  }
  const traces = [...kinds].map(([kind, marks]) => {
    const permanent = kind.startsWith("permanent"), kept = kind.endsWith("kept");
    return {
      type: "scatter", mode: "markers", name: escaped(kind), x: marks.map((one) => one.step),
      y: marks.map((one) => lanes.get(one.lane)), hovertext: marks.map((one) => one.text.filter(Boolean).map(escaped).join("<br>")),
      hoverinfo: "text",
      marker: { symbol: (permanent ? "diamond" : "circle") + (kept ? "" : "-open"), size: permanent ? 11 : 8,
        color: permanent ? "#1f6feb" : "#e07b00", line: { width: 1.5, color: permanent ? "#1f6feb" : "#e07b00" } },
    };
  });
  Plotly.react(plot, traces, {
    ...LAYOUT, showlegend: traces.length > 1 && block.lanes.length !== traces.length,
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    xaxis: { ...AXIS, title: { text: "step", standoff: 6 } },
    yaxis: { ...AXIS, tickvals: [...lanes.values()], ticktext: [...lanes.keys()].map(escaped), range: [-0.6, block.lanes.length - 0.3], fixedrange: true },
  }, CONFIG);
}

function drawParallel(block, plot) {
  const dimensions = block.axes.map((axis) => {
    const ticks = axis.ticks ? Object.entries(axis.ticks).map(([value, text]) => [Number(value), text]).sort((a, b) => a[0] - b[0]) : null;
    const low = Math.min(...axis.values), high = Math.max(...axis.values);
    const named = ticks ? { tickvals: ticks.map((one) => one[0]), ticktext: ticks.map((one) => escaped(one[1])) } : {};
    return { label: escaped(axis.label), values: axis.values, range: low === high ? [low - 1, high + 1] : [low, high], ...named };
  });
  Plotly.react(plot, [{
    type: "parcoords", dimensions, labelfont: { size: 12 }, tickfont: { size: 11 },
    line: { color: block.colour, colorscale: "Viridis", reversescale: block.smaller, showscale: true },
  }], { ...LAYOUT, margin: { l: 70, r: 50, t: 50, b: 20 } }, CONFIG);
}

const DRAW = { chart: drawCurves, timeline: drawTimeline, parallel: drawParallel };

// A chart is drawn once it is about to be seen: a run may have hundreds of metrics.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) draw(charts.find((one) => one.plot === entry.target));
}, { rootMargin: "500px" });

function draw(chart) {
  const isFirst = !chart.drawn;
  seen.unobserve(chart.plot);
  chart.drawn = true;
  DRAW[chart.block.kind](chart.block, chart.plot);
  if (isFirst && zoomed && chart.block.kind === "chart") Plotly.relayout(chart.plot, { "xaxis.range": zoomed });
}

// The commands that look at a step of a run: of a clicked point, or of the step that is typed.
let looked = 0;
function lookAt(run, step) {
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

function redraw() {
  byId("smoothed").textContent = state.smooth.toFixed(2);
  for (const one of charts) if (one.drawn && one.block.kind === "chart") draw(one);
}

function addChart(block, parent) {
  const frame = element("div", null, parent, block.kind === "chart" ? "chart" : "chart wide");
  element("h3", block.title, frame);
  const note = block.curves ? notes(block) : "";
  if (note) element("p", note, frame);
  const plot = element("div", null, frame, "plot");
  if (block.kind === "timeline") plot.style.height = `${Math.min(900, 110 + 34 * block.lanes.length)}px`;
  if (block.kind === "parallel") plot.style.height = "380px";
  charts.push({ block, plot, frame, drawn: false });
  seen.observe(plot);
}

function addTable(block, parent) {
  const count = block.rows.length;
  if (block.fold) {
    parent = element("details", null, parent);
    element("summary", `${block.title || "Table"} (${count})`, parent);
  } else if (block.title) element("h3", block.title, parent);
  let find = null;
  if (block.filter && count > 12) {
    find = element("input", null, parent);
    find.type = "search";
    find.placeholder = "find";
  }
  const table = element("table", null, element("div", null, parent, "box"));
  const head = element("tr", null, element("thead", null, table));
  for (const column of block.columns) element("th", column.name, head, column.right ? "right" : "");
  const body = element("tbody", null, table);
  const rows = block.rows.map((cells, index) => {
    const row = element("tr", null, body, (block.marked || []).includes(index) ? "marked" : "");
    cells.forEach((text, at) => {
      const cell = element("td", at || !block.choose ? text : null, row, block.columns[at].right ? "right" : "");
      if (!at && block.choose) addChoice(block.runs[index], text, cell);
    });
    return row;
  });
  if (find) find.addEventListener("input", () => {
    const wanted = find.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

function addChoice(run, name, cell) {
  const label = element("label", null, cell);
  const box = element("input", null, label);
  box.type = "checkbox";
  box.checked = true;
  box.addEventListener("change", () => { hidden[box.checked ? "delete" : "add"](run); redraw(); });
  element("span", null, label, "swatch").style.background = colourOfRun(run);
  element("span", name, label);
}

function addFacts(block, parent) {
  const list = element("dl", null, parent);
  for (const [name, text] of block.items) {
    const item = element("div", null, list);
    element("dt", name, item);
    element("dd", text, item);
  }
}

function build() {
  byId("title").textContent = document.title = data.title;
  byId("made").textContent = `Report of ${data.made}`;
  data.sections.forEach((section, index) => {
    const part = element("section", null, byId("sections"));
    part.id = `section-${index}`;
    element("h2", section.title, part);
    element("a", section.title, byId("contents")).addEventListener("click", () => part.scrollIntoView());
    let grid = null;
    for (const block of section.blocks) {
      if (DRAW[block.kind]) addChart(block, grid = grid || element("div", null, part, "charts"));
      else {
        grid = null;
        (block.kind === "facts" ? addFacts : addTable)(block, part);
      }
    }
  });
  for (const id of ["x", "smooth"]) {
    byId(id).value = state[id];
    byId(id).addEventListener("input", () => {
      state[id] = id === "smooth" ? Number(byId(id).value) : byId(id).value;
      if (id === "x") zoomed = null;
      remember();
      redraw();
    });
  }
  for (const id of ["logx", "logy"]) {
    byId(id).checked = state[id];
    byId(id).addEventListener("change", () => { state[id] = byId(id).checked; remember(); redraw(); });
  }
  byId("find").addEventListener("input", () => {
    const wanted = byId("find").value.toLowerCase();
    for (const one of charts) if (one.block.curves) one.frame.hidden = !one.block.curves.some((each) => each.name.toLowerCase().includes(wanted));
  });
  byId("look").hidden = !data.looks.length;
  byId("step").addEventListener("input", showCommands);
  redraw();
}

build();
