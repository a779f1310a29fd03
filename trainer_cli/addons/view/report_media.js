// Draws texts, images, histograms, tables and matrices of a run, each with a slider over its steps.

const MOST_COLUMNS = 7;  // A matrix with more columns takes the whole width.

function addMedia(key, block, parent) {
  if (block.title) element("h3", block.title, parent);
  if (block.media.some((medium) => medium.items[0].image !== undefined)) addImageControls(key, parent);
  const grid = element("div", null, parent, "charts");
  for (const medium of block.media) {
    const isWide = medium.items[0].matrix && medium.items[0].columns.length > MOST_COLUMNS;
    const frame = element("div", null, grid, isWide ? "chart medium wide" : "chart medium"), last = medium.items.length - 1;
    frame.dataset.name = medium.name;
    element("h3", medium.name, frame);
    const memory = `${key}/${medium.name}/${Object.keys(medium.items[0])[1]}`;
    const label = element("label", null, frame), slider = element("input", null, label), step = element("span", null, label);
    const body = element("div", null, frame);
    slider.type = "range";
    slider.max = last;
    slider.hidden = !last;
    slider.dataset.focus = `step ${memory}`;
    slider.setAttribute("aria-label", `step of ${medium.name}`);
    // A step that was chosen stays chosen in a live page; else the newest is shown.
    const chosen = medium.items.findIndex((item) => item.step === remembered.get(memory));
    slider.value = chosen < 0 ? last : chosen;
    const show = () => {
      const item = medium.items[slider.value];
      step.textContent = `step ${item.step.toLocaleString("en")}${item.time ? `, ${item.time}` : ""}`;
      slider.setAttribute("aria-valuetext", step.textContent);
      body.replaceChildren();
      drawMedium(medium, item, body);
    };
    slider.addEventListener("input", () => {
      if (Number(slider.value) === last) remembered.delete(memory);
      else remembered.set(memory, medium.items[slider.value].step);
      show();
    });
    show();
  }
}

// Brightness and contrast of all images of a run, as in TensorBoard, and whether large ones keep their size.
function addImageControls(key, parent) {
  const controls = element("div", null, parent, "choices"), memory = `${key}/images`;
  const settings = remembered.get(memory) || { brightness: 1, contrast: 1, full: false };
  remembered.set(memory, settings);
  const show = () => {
    parent.style.setProperty("--brightness", settings.brightness);
    parent.style.setProperty("--contrast", settings.contrast);
    parent.classList.toggle("full", settings.full);
  };
  const ranges = ["brightness", "contrast"].map((name) => {
    const field = element("input", null, element("label", `${name} `, controls));
    Object.assign(field, { type: "range", min: 0.2, max: 5, step: 0.1, value: settings[name] });
    field.dataset.focus = `${name} ${key}`;
    field.addEventListener("input", () => { settings[name] = Number(field.value); show(); });
    return field;
  });
  const label = element("label", null, controls), full = element("input", null, label);
  Object.assign(full, { type: "checkbox", checked: settings.full });
  element("span", " actual size", label);
  full.dataset.focus = `full ${key}`;
  full.addEventListener("change", () => { settings.full = full.checked; show(); });
  const reset = element("button", "reset", controls);
  reset.dataset.focus = `reset ${key}`;
  reset.addEventListener("click", () => {
    Object.assign(settings, { brightness: 1, contrast: 1, full: false });
    for (const field of ranges) field.value = 1;
    full.checked = false;
    show();
  });
  show();
}

function drawMedium(medium, item, parent) {
  const { name } = medium;
  if (item.image !== undefined) {
    const image = element("img", null, makeScrollable(element("div", null, parent, "picture"), name));
    image.alt = `${name} at step ${item.step}`;
    image.src = item.image;
    // Small pictures, such as digits of 8 x 8 pixels, are enlarged without a blur.
    image.addEventListener("load", () => { if (image.naturalWidth < 160) image.classList.add("small"); });
  } else if (item.text !== undefined) makeScrollable(element("pre", item.text, parent), name);
  else if (item.counts) drawHistograms(medium, item, parent);
  else drawMatrix(name, item, parent);
}

// The values of a histogram below which the shares of all values lie.
function quantilesOf({ counts, edges }, shares) {
  const total = counts.reduce((a, b) => a + b, 0);
  return shares.map((share) => {
    let left = share * total;
    const bin = counts.findIndex((count) => { if (count && left <= count) return true; left -= count; return false; });
    return bin < 0 ? edges[counts.length] : edges[bin] + (left / counts[bin]) * (edges[bin + 1] - edges[bin]);
  });
}

const SHARES = [0, 0.07, 0.16, 0.31, 0.5, 0.69, 0.84, 0.93, 1];  // As in TensorBoard.

// The histogram of a step, and above it how the values are distributed over all steps.
function drawHistograms({ name, items }, item, parent) {
  if (items.length > 1) {
    const x = items.map(({ step }) => step), rows = items.map((other) => quantilesOf(other, SHARES));
    const line = (at) => rows.map((row) => row[at]);
    const bands = [0, 1, 2, 3].map((at) => ({ name, x, y: line(4), low: line(at), high: line(8 - at), colour: colour(0) }));
    drawLines(element("div", null, parent, "distribution"), bands, {
      height: 180, title: "step", marks: [{ at: item.step, text: `step ${item.step}` }],
      label: `${name} over ${items.length} steps: median from ${format(rows[0][4])} to ${format(rows[rows.length - 1][4])}, `
        + `smallest ${format(Math.min(...line(0)))}, largest ${format(Math.max(...line(8)))}; bands of 38, 68, 86 and 100 %`,
    });
  }
  drawHistogram(name, item, parent);
}

function drawHistogram(name, item, parent) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
  const most = Math.max(...item.counts, 1), width = 400 / item.counts.length, total = item.counts.reduce((a, b) => a + b, 0);
  const edges = item.edges.map((edge) => format(edge, 4)), last = edges[item.counts.length];
  svg.setAttribute("viewBox", "0 0 400 120");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${name}: ${total} values from ${edges[0]} to ${last}, at most ${most} in a bin`);
  item.counts.forEach((count, at) => {
    const bar = document.createElementNS(space, "rect"), height = (count / most) * 118;
    for (const [field, value] of Object.entries({ x: at * width, y: 120 - height, width: width * 0.92, height })) bar.setAttribute(field, value);
    bar.dataset.tip = `${count} from ${edges[at]} to ${edges[at + 1]}`;
    svg.appendChild(bar);
  });
  const plot = element("div", null, parent);
  plot.appendChild(svg);
  watchMarks(plot, `${name}: arrow keys show the count of each bin`);
  const range = element("div", null, parent, "range");
  element("span", edges[0], range);
  element("span", `${total.toLocaleString("en")} values, at most ${most.toLocaleString("en")} in a bin`, range);
  element("span", last, range);
}

function drawMatrix(name, item, parent) {
  const box = makeScrollable(element("div", null, parent, "box"), name), table = element("table", null, box, item.matrix ? "matrix" : "");
  const head = element("tr", null, element("thead", null, table)), body = element("tbody", null, table);
  for (const name of item.columns) element("th", name, head).scope = "col";
  for (const cells of item.rows) {
    const row = element("tr", null, body), sum = cells.slice(1).reduce((a, text) => a + Math.abs(Number(text)), 0);
    cells.forEach((text, at) => {
      if (item.matrix && !at) return void (element("th", text, row).scope = "row");
      const cell = element("td", text, row);
      const share = item.matrix && sum ? Math.abs(Number(text)) / sum : 0;
      if (item.matrix) cell.title = `${(100 * share).toFixed(1)} % of the row`;
      if (share) cell.style.background = `color-mix(in srgb, var(--shade) ${Math.round(100 * share)}%, transparent)`;
    });
  }
  if (!item.matrix) return;
  const scale = element("div", null, parent, "range");
  element("span", "0", scale);
  element("i", null, scale);
  element("span", "all of the row", scale);
}
