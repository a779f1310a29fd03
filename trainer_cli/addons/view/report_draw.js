// Draws curves, checkpoints and sweeps as SVG. Texts of runs are set as text nodes, never as markup.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "2 3", "7 4", "7 3 2 3", "12 4"];

function element(tag, text, parent, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.appendChild(made);
  return made;
}

// A text that breaks only between words, also those of names and paths.
function setWords(node, text) {
  node.replaceChildren(...text.split(/(?<=[_/.,=-])/).flatMap((part) => [part, document.createElement("wbr")]));
  return node;
}

// Make an element that scrolls reachable by the keyboard, and name it.
function makeScrollable(node, label) {
  node.tabIndex = 0;
  node.setAttribute("role", "region");
  node.setAttribute("aria-label", label);
  return node;
}

function shape(tag, attributes, parent, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

// Colours. A relative luminance between 0.15 and 0.29 has a contrast of at least 3:1 on the white and the dark page.
const HUES = [215, 24, 150, 350, 275, 95, 320, 188, 48, 245];
const LUMINANCES = [0.18, 0.27, 0.22];
const colours = new Map();

function rgb(hue, saturation, lightness) {
  const chroma = saturation * Math.min(lightness, 1 - lightness);
  return [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12;
    return lightness - chroma * Math.max(-1, Math.min(k - 3, 9 - k, 1));
  });
}

function luminance(parts) {
  const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function colourOfHue(hue, target) {
  const key = `${hue} ${target}`;
  if (!colours.has(key)) {
    let low = 0, high = 1;
    for (let round = 0; round < 12; round += 1) {
      const middle = (low + high) / 2;
      if (luminance(rgb(hue, 0.75, middle)) < target) low = middle; else high = middle;
    }
    colours.set(key, `rgb(${rgb(hue, 0.75, low).map((part) => Math.round(part * 255)).join(", ")})`);
  }
  return colours.get(key);
}

// Beyond the listed hues the golden angle gives hues that are far from their neighbours.
const colour = (index) =>
  colourOfHue(index < HUES.length ? HUES[index] : (index * 137.508) % 360, LUMINANCES[index % LUMINANCES.length]);

// Numbers and axes
function format(value, digits = 5) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return Number(value.toPrecision(size >= 1e4 ? 7 : digits)).toLocaleString("en", { maximumSignificantDigits: 7 });
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) ticks.push(at * step);
  return ticks;
}

function logTicks(low, high, count) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / count));
  const factors = to - from <= 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = from; power <= to; power += every) for (const factor of factors) ticks.push(factor * 10 ** power);
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 1 ? inside : linearTicks(low, high, count);
}

// The texts of ticks, with enough digits to differ.
function tickTexts(ticks) {
  for (let digits = 5; ; digits += 1) {
    const texts = ticks.map((tick) => format(tick, digits));
    if (digits > 9 || new Set(texts).size === texts.length) return texts;
  }
}

// Maps values from low to high on pixels. A constant is in the middle, with its value as the only tick.
function scaleOf(low, high, start, end, isLog, count) {
  if (!Number.isFinite(low)) [low, high] = isLog ? [1, 10] : [0, 1];
  const constant = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));  // Smoothing rounds.
  const ticks = constant ? [low] : isLog ? logTicks(low, high, count) : linearTicks(low, high, count);
  if (constant) [low, high] = isLog ? [low / 2, high * 2] : [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const of = isLog ? Math.log10 : (value) => value;
  const first = of(low), width = of(high) - first;
  return {
    low, high, ticks, isLog,
    at: (value) => start + ((of(value) - first) / width) * (end - start),
    value: (pixel) => { const plain = first + ((pixel - start) / (end - start)) * width; return isLog ? 10 ** plain : plain; },
  };
}

// The range of most values: of each array without its smallest and its largest twentieth, as in TensorBoard.
function extentOfMost(arrays, isLog) {
  return extent(arrays.map((values) => {
    const sorted = values.filter((value) => value !== null && !(isLog && value <= 0)).sort((a, b) => a - b), last = sorted.length - 1;
    return sorted.slice(Math.floor(0.05 * last), Math.ceil(0.95 * last) + 1);
  }), isLog);
}

function extent(arrays, isLog) {
  let low = Infinity, high = -Infinity;
  for (const values of arrays) for (const value of values) {
    if (value === null || (isLog && value <= 0)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

const LONGEST_NAME = 40;  // Letters of a run's name in legends and column heads.

// Shorten in the middle, between words where there are some: long names often differ only at their ends.
function cut(text, length) {
  if (text.length <= length) return text;
  const [head, tail] = [text.slice(0, Math.ceil(length / 2) - 1), text.slice(-Math.floor(length / 2))];
  return `${(/^.*[_/.,= -]/.exec(head) || [head])[0]}…${(/[_/.,= -].*$/.exec(tail) || [tail])[0]}`;
}

function canvas(plot, width, height, label) {
  plot.replaceChildren();
  return shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, plot);
}

// Axes with grid lines; the ticks of x keep the distance of their texts.
function drawAxes(svg, box, xs, ys, title) {
  const last = Number(svg.getAttribute("width")) - 2;
  const [textsOfX, textsOfY] = [xs, ys].map((scale) => tickTexts(scale.ticks));
  ys.ticks.forEach((tick, at) => {
    const y = ys.at(tick);
    shape("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }, svg);
    shape("text", { class: "tick", x: box.left - 6, y: y + 4, "text-anchor": "end" }, svg, textsOfY[at]);
  });
  let free = -Infinity;
  xs.ticks.forEach((tick, at) => {
    const x = xs.at(tick), text = textsOfX[at], half = text.length * 3.4;
    shape("line", { class: "grid", x1: x, x2: x, y1: box.top, y2: box.bottom }, svg);
    const middle = Math.min(x, last - half);  // The last one may end where the drawing ends.
    if (middle - half < free) return;
    shape("text", { class: "tick", x: middle, y: box.bottom + 16, "text-anchor": "middle" }, svg, text);
    free = middle + half + 8;
  });
  shape("text", { class: "tick", x: (box.left + box.right) / 2, y: box.bottom + 33, "text-anchor": "middle" }, svg, title);
  shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
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

const MOST_PLACES = 500;

// The mean of curves at the places of all of them, with the smallest and the largest of their values. A curve counts
// between its own ends, where it is interpolated; values that are not finite are left out.
function meanOf(curves) {
  const finite = curves.map(({ x, y }) => [x, y].map((values) => values.filter((_, at) => y[at] !== null)));
  let places = [...new Set(finite.flatMap(([x]) => x))].sort((a, b) => a - b);
  if (places.length > MOST_PLACES) {
    const first = places[0], width = places[places.length - 1] - first;
    places = Array.from({ length: MOST_PLACES }, (_, at) => first + (width * at) / (MOST_PLACES - 1));
  }
  const next = finite.map(() => 0), mean = { x: [], y: [], low: [], high: [] };
  for (const place of places) {
    const values = [];
    finite.forEach(([x, y], row) => {
      if (!x.length || place < x[0] || place > x[x.length - 1]) return;
      while (x[next[row]] < place) next[row] += 1;
      const to = next[row], from = Math.max(0, to - 1);
      values.push(x[to] === place ? y[to] : y[from] + ((place - x[from]) / (x[to] - x[from])) * (y[to] - y[from]));
    });
    if (!values.length) continue;
    const [low, high] = extent([values]);
    mean.x.push(place);
    mean.y.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    mean.low.push(low);
    mean.high.push(high);
  }
  return mean;
}

function pathOf(x, y, xs, ys) {
  let path = "", isDown = false;
  for (let at = 0; at < x.length; at += 1) {
    const usable = y[at] !== null && x[at] !== null && !(ys.isLog && y[at] <= 0) && !(xs.isLog && x[at] <= 0);
    if (usable) path += `${isDown ? "L" : "M"}${xs.at(x[at]).toFixed(1)} ${ys.at(y[at]).toFixed(1)}`;
    isDown = usable;
  }
  return path;
}

const MOST_POINTS = 60;  // Lines of at most so many points show each.
const MARKS_PX = 5;  // Smallest distance of two marks.

// lines: [{name, colour, dash, x, y, faint, bad, low, high, bars}]; options.levels: [[y, text]]. Returns what hover and zoom need.
function drawLines(plot, lines, options) {
  const width = plot.clientWidth || 440, height = options.height || 260;
  const svg = canvas(plot, width, height, options.label);
  const [low, high] = options.range || extent(lines.map((line) => line.x), options.logx);
  const inside = lines.map((line) => [line.y, line.low, line.high].filter(Boolean).flatMap((values) =>
    options.range ? values.filter((_, at) => line.x[at] >= low && line.x[at] <= high) : values));
  const levels = options.levels || [];
  const whole = extent([...inside, levels.map(([y]) => y)], options.logy);
  let [least, most] = options.trimsOutliers ? extentOfMost(inside, options.logy) : whole;
  const isTrimmed = least > whole[0] || most < whole[1];
  if (least < most && !options.logy) [least, most] = [least - (most - least) * 0.04, most + (most - least) * 0.04];
  const probe = scaleOf(least, most, 1, 0, options.logy, 5);
  const margin = Math.max(34, 14 + 6.6 * Math.max(...tickTexts(probe.ticks).map((text) => text.length)));
  const box = { left: margin, right: width - 14, top: 10, bottom: height - 40 };
  const xs = scaleOf(low, high, box.left, box.right, options.logx, Math.max(2, Math.floor(width / 70)));
  if (options.whole) xs.ticks = xs.ticks.filter(Number.isInteger);
  const ys = scaleOf(least, most, box.bottom, box.top, options.logy, 5);
  drawAxes(svg, box, xs, ys, options.title);
  const clip = `clip${drawLines.count = (drawLines.count || 0) + 1}`;
  shape("rect", { x: box.left, y: box.top - 6, width: Math.max(1, box.right - box.left), height: box.bottom - box.top + 12 },
    shape("clipPath", { id: clip }, svg));
  const area = shape("g", { "clip-path": `url(#${clip})` }, svg);
  for (const mark of options.marks || []) {
    const line = shape("line", { class: "restart", x1: xs.at(mark.at), x2: xs.at(mark.at), y1: box.top, y2: box.bottom }, area);
    if (mark.colour) line.style.stroke = mark.colour;
    shape("title", {}, line, mark.text);
  }
  for (const [y, text] of levels.filter(([value]) => !ys.isLog || value > 0)) {
    shape("line", { class: "restart", x1: box.left, x2: box.right, y1: ys.at(y), y2: ys.at(y) }, area);
    shape("text", { class: "halo", x: box.left + 4, y: ys.at(y) - 4 }, area, text);
  }
  for (const line of lines) {
    if (line.low) {
      const up = pathOf(line.x, line.high, xs, ys), down = pathOf([...line.x].reverse(), [...line.low].reverse(), xs, ys);
      if (up && down) shape("path", { class: "band", d: `${up}L${down.slice(1)}Z`, fill: line.colour }, area);
      // The band of a single step has no area.
      if (line.x.length === 1 || line.bars) line.x.forEach((x, at) => {
        if (line.low[at] !== null) shape("path", { class: "curve", d: `M${xs.at(x)} ${ys.at(line.low[at])}V${ys.at(line.high[at])}`, stroke: line.colour }, area);
      });
    }
    const path = shape("path", { class: "curve", d: pathOf(line.x, line.y, xs, ys), stroke: line.colour, "stroke-dasharray": line.dash || "" }, area);
    if (line.faint) path.classList.add("faint");
    if (line.x.length <= MOST_POINTS && !line.faint) line.x.forEach((x, at) => {
      if (line.y[at] !== null && !(ys.isLog && line.y[at] <= 0)) shape("circle", { cx: xs.at(x), cy: ys.at(line.y[at]), r: 2.6, fill: line.colour }, area);
    });
    let last = -Infinity;
    for (const x of line.bad || []) {
      if (xs.at(x) - last < MARKS_PX) continue;
      last = xs.at(x);
      const cross = shape("text", { class: "bad", x: xs.at(x), y: box.bottom - 3, "text-anchor": "middle" }, area, "×");
      cross.style.fill = line.colour;
      shape("title", {}, cross, `${line.name}: not finite at ${format(x)}`);
    }
  }
  const hover = shape("g", { class: "hover" }, svg);
  return { svg, box, xs, ys, hover, lines, trimmedFrom: isTrimmed ? whole : null };
}

// The index of the value next to x in a rising array.
function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle; else high = middle;
  }
  return high > low && Math.abs(values[high] - x) < Math.abs(values[low] - x) ? high : Math.max(0, low);
}

const LANE_PX = 13;  // Smallest distance of the names of two lanes.

// Checkpoints in lanes, each at its step.
function drawTimeline(block, plot) {
  const width = plot.clientWidth || 800, height = Math.min(900, 70 + 30 * block.lanes.length);
  const label = `${block.title}: ${block.marks.length} checkpoints, the last at step ${Math.max(...block.marks.map((mark) => mark.step))}`;
  const svg = canvas(plot, width, height, label);
  const letters = Math.max(8, Math.min(40, Math.floor(width / 18)));
  const box = { left: Math.min(260, 20 + 6.8 * Math.min(letters, Math.max(...block.lanes.map((lane) => lane.length)))), right: width - 18, top: 8, bottom: height - 40 };
  const xs = scaleOf(Math.min(0, ...block.marks.map((mark) => mark.step)), Math.max(...block.marks.map((mark) => mark.step)),
    box.left + 10, box.right - 8, false, Math.max(2, Math.floor(width / 110)));
  const y = new Map(block.lanes.map((lane, index) => [lane, box.top + (box.bottom - box.top) * ((index + 0.5) / block.lanes.length)]));
  drawAxes(svg, box, xs, { ticks: [] }, "step");
  let free = -Infinity;
  for (const [lane, at] of y) {
    shape("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }, svg);
    if (at < free) continue;  // Of a hundred lanes not each has room for its name.
    free = at + LANE_PX;
    shape("title", {}, shape("text", { class: "tick", x: box.left - 8, y: at + 4, "text-anchor": "end" }, svg, cut(lane, letters)), lane);
  }
  for (const mark of block.marks) {
    const regular = mark.type === "regular", x = xs.at(mark.step), at = y.get(mark.lane);
    const tint = regular ? colour(0) : colour(1), fill = mark.kept ? tint : "var(--page)";
    const made = regular
      ? shape("path", { d: `M${x} ${at - 6}L${x + 6} ${at}L${x} ${at + 6}L${x - 6} ${at}Z`, fill, stroke: tint, "stroke-width": 1.5 }, svg)
      : shape("circle", { cx: x, cy: at, r: 4, fill, stroke: tint, "stroke-width": 1.5 }, svg);
    made.dataset.tip = mark.text.filter(Boolean).join("\n");
  }
}

const tickText = (axis, value) =>
  (axis.ticks && axis.ticks[String(value)] !== undefined ? axis.ticks[String(value)] : format(axis.log ? 10 ** value : value));

function ticksOf(axis, low, high) {
  if (axis.ticks) return Object.keys(axis.ticks).map(Number).sort((a, b) => a - b);
  return low === high ? [low] : linearTicks(low, high, 5).filter((tick) => !axis.log || Number.isInteger(tick));
}

const rangeOf = (values) => { const [low, high] = extent([values]); return low === high ? [low - 1, high + 1] : [low, high]; };
const pointText = (block, row) =>
  [data.runs[block.runs[row]] ?? "", ...block.axes.map((axis) => `${axis.label}: ${tickText(axis, axis.values[row])}`)].join("\n");

// An axis for each parameter and metric, a line for each run. A drag along an axis keeps the lines that pass there.
function drawParallel(block, plot) {
  const step = Math.max(110, ((plot.clientWidth || 800) - 150) / Math.max(1, block.axes.length - 1));
  const width = 150 + step * (block.axes.length - 1), height = 330, top = 40, bottom = height - 16;
  const svg = canvas(plot, width, height, `${block.title}: ${block.runs.length} runs over ${block.axes.map((axis) => axis.label).join(", ")}`);
  const scales = block.axes.map((axis) => { const [low, high] = rangeOf(axis.values); return scaleOf(low, high, bottom, top, false, 5); });
  const paths = block.runs.map((run, row) => {
    const path = block.axes.map((axis, at) => `${at ? "L" : "M"}${70 + at * step} ${scales[at].at(axis.values[row]).toFixed(1)}`).join("");
    const made = shape("path", { class: "run", d: path, stroke: colour(run) }, svg);
    made.dataset.tip = pointText(block, row);
    return made;
  });
  const limits = new Map();
  const show = () => paths.forEach((path, row) => path.classList.toggle("out",
    [...limits].some(([at, [low, high]]) => block.axes[at].values[row] < low || block.axes[at].values[row] > high)));
  block.axes.forEach((axis, at) => {
    const x = 70 + at * step, group = shape("g", {}, svg);
    // The first and the last label have 70 pixels to the edge; the tooltip has all.
    const letters = Math.floor((at && at < block.axes.length - 1 ? step : Math.min(step, 140)) / 7);
    shape("title", {}, shape("text", { class: "label", x, y: 16, "text-anchor": "middle" }, group, cut(axis.label, letters)), axis.label);
    shape("line", { class: "axis", x1: x, x2: x, y1: top, y2: bottom }, group);
    for (const tick of ticksOf(axis, ...extent([axis.values]))) {
      shape("text", { class: "tick halo", x: x + 6, y: scales[at].at(tick) + 4 }, group, cut(tickText(axis, tick), Math.floor(step / 8)));
    }
    const brush = shape("rect", { class: "brush", x: x - 8, width: 16, y: 0, height: 0 }, group);
    const grip = shape("rect", { class: "grip", x: x - 10, width: 20, y: top - 6, height: bottom - top + 12 }, group);
    grip.addEventListener("pointerdown", (event) => {
      const offset = svg.getBoundingClientRect().top, from = event.clientY - offset;
      grip.setPointerCapture(event.pointerId);
      const move = (next) => {
        const [a, b] = [from, next.clientY - offset].sort((one, other) => one - other);
        if (b - a < 4) limits.delete(at); else limits.set(at, [scales[at].value(b), scales[at].value(a)]);
        brush.setAttribute("y", a);
        brush.setAttribute("height", b - a < 4 ? 0 : b - a);
        show();
      };
      grip.addEventListener("pointermove", move);
      grip.addEventListener("pointerup", (next) => { move(next); grip.removeEventListener("pointermove", move); }, { once: true });
    });
  });
}

// A metric against a parameter, both to be chosen.
function drawScatter(block, plot) {
  // By their labels: other runs have other axes.
  const [x, y] = [(axis) => !axis.metric, (axis) => axis.metric].map((isFirst, at) =>
    block.axes.find((axis) => axis.label === (plot.chosen || [])[at]) || block.axes.find(isFirst) || block.axes[0]);
  const width = plot.clientWidth || 440, height = 250;
  const svg = canvas(plot, width, height, `${y.label} against ${x.label}: ${block.runs.length} runs`);
  const box = { left: 70, right: width - 24, top: 12, bottom: height - 40 };
  const [xs, ys] = [[x, box.left + 12, box.right - 12], [y, box.bottom - 8, box.top + 8]].map(([axis, start, end]) => {
    const scale = scaleOf(...rangeOf(axis.values), start, end, false, 5);
    return { ...scale, ticks: ticksOf(axis, ...extent([axis.values])) };
  });
  drawAxes(svg, box, { ...xs, ticks: [] }, { ...ys, ticks: [] }, cut(x.label, Math.floor(width / 8)));
  for (const tick of xs.ticks) {
    const text = cut(tickText(x, tick), 12), middle = Math.min(xs.at(tick), width - 2 - text.length * 3.4);
    shape("text", { class: "tick", x: middle, y: box.bottom + 16, "text-anchor": "middle" }, svg, text);
  }
  for (const tick of ys.ticks) shape("text", { class: "tick", x: box.left - 6, y: ys.at(tick) + 4, "text-anchor": "end" }, svg, cut(tickText(y, tick), 9));
  block.runs.forEach((run, row) => {
    const point = shape("circle", { cx: xs.at(x.values[row]), cy: ys.at(y.values[row]), r: 5, fill: colour(run) }, svg);
    point.dataset.tip = pointText(block, row);
  });
  const choices = element("div", null, plot, "choices");
  [y, x].forEach((shown, at) => {
    const select = element("select", null, element("label", at ? "against " : "", choices));
    block.axes.forEach((axis, number) => { element("option", axis.label, select).value = number; });
    select.value = block.axes.indexOf(shown);
    select.addEventListener("change", () => {
      const other = block.axes[select.value].label;
      plot.chosen = at ? [other, y.label] : [x.label, other];
      drawScatter(block, plot);
    });
  });
}

function drawBars(block, plot) {
  plot.replaceChildren();
  const list = element("dl", null, plot, "shares");
  for (const [name, share, text] of block.bars) {
    element("dt", name, list).title = name;
    const bar = element("i", null, element("dd", text, list));
    bar.style.width = `${Math.round(100 * share)}%`;
  }
}
